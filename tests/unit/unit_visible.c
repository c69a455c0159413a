/* visible.h against the rule spelled out key by key, over all small sizes: rows, tiles of rows, tiles of keys. */
#include "support.h"

#include <math.h>

#include "visible.h"

/* The rule as the header of the library states it. */
static bool sees(visible_entry e, int32_t row, int32_t key)
{
    const int32_t position = e.rule.mask == FWD_MASK_TOP_LEFT ? row : row + e.kv_len - e.q_len;
    if (row < 0 || row >= e.q_len || key < e.kv_start || key >= e.kv_len)
        return false;
    if (e.rule.chunk > 0 &&
        floor((double)(key - e.kv_start) / e.rule.chunk) != floor((double)(position - e.kv_start) / e.rule.chunk))
        return false;
    if (e.rule.mask != FWD_MASK_NONE && key > position)
        return false;
    if (e.rule.window_left > 0 && key <= position - e.rule.window_left)
        return false;
    return e.rule.window_right == 0 || key <= position + e.rule.window_right;
}

/* Of a tile of rows and a tile of keys: how many pairs exist, padding included, and how many of them are visible. */
typedef struct pairs {
    int exist, visible;
} pairs;

static pairs count_pairs(visible_entry e, int32_t first_row, int32_t rows, int32_t first_key, int32_t keys)
{
    pairs count = {0, 0};
    for (int32_t row = first_row; row < first_row + rows && row < e.q_len; row++)
        for (int32_t key = first_key; key < first_key + keys && key < e.kv_len; key++) {
            count.exist++;
            count.visible += sees(e, row, key);
        }
    return count;
}

/* Calls `check` for an entry with each small chunk and start of its keys; how many there were. */
static int for_all_limits(void (*check)(visible_entry), visible_entry e)
{
    int count = 0;
    for (e.rule.chunk = 0; e.rule.chunk <= 5; e.rule.chunk++)
        for (e.kv_start = 0; e.kv_start <= e.kv_len; e.kv_start += 1 + e.kv_start / 2) {
            check(e);
            count++;
        }
    return count;
}

/* Calls `check` for every small entry without a chunk or padding, and for fewer with them; how many there were. */
static int for_all_entries(void (*check)(visible_entry))
{
    enum {
        LENGTH_MAX = 9
    };
    int count = 0;
    for (int32_t mask = FWD_MASK_NONE; mask <= FWD_MASK_BOTTOM_RIGHT; mask++)
        for (int32_t q_len = 1; q_len <= LENGTH_MAX; q_len++)
            for (int32_t kv_len = 0; kv_len <= LENGTH_MAX; kv_len++)
                for (int32_t left = 0; left <= LENGTH_MAX + 1; left++)
                    for (int32_t right = 0; right <= (mask == FWD_MASK_NONE ? LENGTH_MAX + 1 : 0); right++) {
                        const visible_entry e = {{mask, left, right, 0}, q_len, kv_len, 0};
                        check(e);
                        count++;
                        if (left % 3 < 2 && right % 3 < 2 && q_len % 3 == 1)
                            count += for_all_limits(check, e);
                    }
    return count;
}

static void check_single_rows(visible_entry e)
{
    for (int32_t row = 0; row < e.q_len; row++)
        for (int32_t key = 0; key < e.kv_len; key++)
            if (sees(e, row, key) != (key >= visible_first(e, row) && key < visible_end(e, row)))
                fail_msg("mask %d window %d/%d chunk %d, %d rows, %d keys from %d: row %d and key %d", e.rule.mask,
                         e.rule.window_left, e.rule.window_right, e.rule.chunk, e.q_len, e.kv_len, e.kv_start, row,
                         key);
}

static void check_sum(visible_entry e)
{
    assert_true(acr__visible_pairs(e) == (double)count_pairs(e, 0, e.q_len, 0, e.kv_len).visible);
}

static void pairs_are_counted(void **state)
{
    (void)state;
    assert_true(for_all_entries(check_sum) > 1000);
    visible_entry huge = {{FWD_MASK_BOTTOM_RIGHT, 0, 0, 0}, INT32_MAX - 1025, INT32_MAX - 1025, 0};
    const double n = (double)huge.q_len;
    assert_true(acr__visible_pairs(huge) == n * (n + 1.0) / 2.0);
    huge.rule.chunk = 1; /* at once, not chunk by chunk */
    assert_true(acr__visible_pairs(huge) == n);
    huge.rule.chunk = 2;
    assert_true(acr__visible_pairs(huge) == n / 2.0 * 3.0);
}

static void single_rows(void **state)
{
    (void)state;
    assert_true(for_all_entries(check_single_rows) > 1000);
}

/* Also of tiles that lie beyond the last row, which count as the last row. */
static void check_row_tiles(visible_entry e)
{
    for (int32_t first = 0; first < e.q_len; first++)
        for (int32_t rows = 1; rows <= e.q_len + 2; rows++) {
            const visible_keys k = visible_to_rows(e, first, rows);
            assert_true(k.first >= 0 && k.first <= e.kv_len && k.full_first >= 0 && k.full_first <= e.kv_len);
            assert_true(k.end >= 0 && k.end <= e.kv_len && k.full_end >= 0 && k.full_end <= e.kv_len);
            for (int32_t key = 0; key < e.kv_len; key++) {
                const pairs p = count_pairs(e, first, rows, key, 1);
                if (key < k.first || key >= k.end)
                    assert_int_equal(p.visible, 0);
                if (key >= k.full_first && key < k.full_end)
                    assert_int_equal(p.visible, p.exist);
            }
            /* as tight as can be: the ends are seen, what is beside the full part is not seen by all */
            if (k.first < k.end) {
                assert_true(count_pairs(e, first, rows, k.first, 1).visible > 0);
                assert_true(count_pairs(e, first, rows, k.end - 1, 1).visible > 0);
            }
            for (int32_t key = 0; key < e.kv_len; key++) {
                const pairs p = count_pairs(e, first, rows, key, 1);
                assert_int_equal(p.visible == p.exist, key >= k.full_first && key < k.full_end);
            }
        }
}

static void row_tiles(void **state)
{
    (void)state;
    for_all_entries(check_row_tiles);
}

static void check_key_tiles_of_rows(visible_entry e)
{
    for (int32_t first = 0; first < e.q_len; first += 2)
        for (int32_t rows = 1; rows <= 4; rows++)
            for (int32_t kv_tile = 1; kv_tile <= 4; kv_tile++) {
                const visible_keys k = visible_to_rows(e, first, rows);
                const visible_tiles t = visible_tiles_of(k, kv_tile);
                assert_true(t.first <= t.full_first && t.full_first <= t.full_end && t.full_end <= t.end);
                for (int32_t tile = 0; tile * kv_tile < e.kv_len; tile++) {
                    const pairs p = count_pairs(e, first, rows, tile * kv_tile, kv_tile);
                    const int visited = tile >= t.first && tile < t.end;
                    const int unmasked = tile >= t.full_first && tile < t.full_end;
                    const int whole = p.visible == p.exist && (tile + 1) * kv_tile <= e.kv_len;
                    if (p.visible > 0)
                        assert_true(visited);
                    if (visited)
                        assert_int_equal(unmasked, !visible_needs_mask(k, tile, kv_tile));
                    assert_int_equal(unmasked, visited && whole);
                }
                if (t.first < t.end) { /* no tile at either end for nothing */
                    assert_true(count_pairs(e, first, rows, t.first * kv_tile, kv_tile).visible > 0);
                    assert_true(count_pairs(e, first, rows, (t.end - 1) * kv_tile, kv_tile).visible > 0);
                }
            }
}

static void key_tiles_of_rows(void **state)
{
    (void)state;
    for_all_entries(check_key_tiles_of_rows);
}

static void check_rows_of_key_tiles(visible_entry e)
{
    for (int32_t first = 0; first <= e.kv_len; first++)
        for (int32_t keys = 1; keys <= e.kv_len + 2; keys++) {
            const visible_rows r = visible_to_keys(e, first, keys);
            assert_true(r.first >= 0 && r.first <= e.q_len && r.full_first >= 0 && r.full_first <= e.q_len);
            assert_true(r.end >= 0 && r.end <= e.q_len && r.full_end >= 0 && r.full_end <= e.q_len);
            for (int32_t row = 0; row < e.q_len; row++) {
                const pairs p = count_pairs(e, row, 1, first, keys);
                if (row < r.first || row >= r.end)
                    assert_int_equal(p.visible, 0);
                assert_int_equal(p.exist > 0 && p.visible == p.exist, row >= r.full_first && row < r.full_end);
            }
            if (r.first < r.end) {
                assert_true(count_pairs(e, r.first, 1, first, keys).visible > 0);
                assert_true(count_pairs(e, r.end - 1, 1, first, keys).visible > 0);
            }
        }
}

static void rows_of_key_tiles(void **state)
{
    (void)state;
    for_all_entries(check_rows_of_key_tiles);
}

/* Lengths and limits near 2^31 overflow nowhere: the sanitizers would say so. */
static void long_entries(void **state)
{
    (void)state;
    const int32_t most = INT32_MAX;
    const visible_entry right = {{FWD_MASK_NONE, 0, most, 0}, 1000, most, 0};
    assert_int_equal(visible_end(right, 0), most);
    assert_int_equal(visible_to_keys(right, 5, 10).first, 0);
    const visible_entry left = {{FWD_MASK_TOP_LEFT, most, 0, 0}, most, most, 0};
    assert_int_equal(visible_first(left, most - 1), 0);
    assert_int_equal(visible_to_keys(left, most - 10, 5).end, most);
    const visible_entry causal = {{FWD_MASK_BOTTOM_RIGHT, 0, 0, 0}, most, most, 0};
    assert_int_equal(visible_end(causal, most - 1), most);
    const visible_entry before = {{FWD_MASK_NONE, 0, 0, most}, most, 1, 1}; /* rows far before the only key, padding */
    assert_int_equal(visible_first(before, 0), 1);
    assert_int_equal(visible_end(before, 0), 1);
    const visible_entry chunk = {{FWD_MASK_TOP_LEFT, 0, 0, most}, most, most, most - 5};
    assert_int_equal(visible_first(chunk, most - 1), most - 5);
    assert_int_equal(visible_end(chunk, most - 1), most);
    assert_int_equal(visible_to_keys(chunk, most - 3, 2).first, most - 3);
    assert_int_equal(visible_to_keys(chunk, most - 3, 2).end, most);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(single_rows),       cmocka_unit_test(pairs_are_counted), cmocka_unit_test(row_tiles),
        cmocka_unit_test(key_tiles_of_rows), cmocka_unit_test(rows_of_key_tiles), cmocka_unit_test(long_entries),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
