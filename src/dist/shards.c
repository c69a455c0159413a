#include "shards.h"

#include "error.h"

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t most(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

int dist_chunks(int ranks, acr_placement placement)
{
    return placement == ACR_ZIGZAG ? 2 * ranks : ranks;
}

acr_rows dist_chunk(int64_t len, int chunks, int index)
{
    const int64_t first = len * index / chunks;
    return (acr_rows){first, len * (index + 1) / chunks - first};
}

int dist_chunk_of(int ranks, int rank, acr_placement placement, int which)
{
    if (which == 0)
        return rank;
    return placement == ACR_ZIGZAG ? 2 * ranks - 1 - rank : -1;
}

int64_t dist_rows_of(int64_t len, int ranks, int rank, acr_placement placement)
{
    const int chunks = dist_chunks(ranks, placement), second = dist_chunk_of(ranks, rank, placement, 1);
    return dist_chunk(len, chunks, rank).count + (second < 0 ? 0 : dist_chunk(len, chunks, second).count);
}

acr_status acr_shard_rows(acr_rows out[2], int64_t len, int32_t ranks, int32_t rank, acr_placement placement)
{
    if (!out)
        return dist_fail(ACR_INVALID, "out is NULL");
    if (len < 0 || len > INT32_MAX)
        return dist_fail(ACR_INVALID, "len is %lld, must be 0 to 2^31 - 1", (long long)len);
    if (ranks < 1 || ranks > ACR_GROUP_RANKS_MAX || rank < 0 || rank >= ranks)
        return dist_fail(ACR_INVALID, "rank is %d of %d ranks, at most %d are served", (int)rank, (int)ranks,
                         ACR_GROUP_RANKS_MAX);
    if (placement != ACR_CONTIGUOUS && placement != ACR_ZIGZAG)
        return dist_fail(ACR_INVALID, "placement is %d, must be ACR_CONTIGUOUS or ACR_ZIGZAG", (int)placement);
    const int chunks = dist_chunks(ranks, placement), second = dist_chunk_of(ranks, rank, placement, 1);
    out[0] = dist_chunk(len, chunks, rank);
    out[1] = second < 0 ? (acr_rows){len, 0} : dist_chunk(len, chunks, second);
    return ACR_OK;
}

/* ---- Pieces ------------------------------------------------------------------------------------------------------ */

int dist_pieces_max(const dist_sequences *s)
{
    return 2 + dist_chunks(s->ranks, s->placement);
}

/* The rows from `row` on, `rows` of them at `position`, cut where a chunk of keys begins. */
static int cut(const dist_sequences *s, dist_piece whole, int split, dist_piece *out)
{
    const int chunks = dist_chunks(s->ranks, s->placement);
    const int64_t end = whole.position + whole.rows;
    int count = 0;
    int64_t at = whole.position;
    for (int i = 0; i <= chunks && split && s->is_causal; i++) {
        const int64_t border = i < chunks ? dist_chunk(s->kv_len, chunks, i).first : s->kv_len;
        if (border > at && border < end) {
            out[count++] = (dist_piece){whole.row + at - whole.position, border - at, at};
            at = border;
        }
    }
    if (at < end)
        out[count++] = (dist_piece){whole.row + at - whole.position, end - at, at};
    return count;
}

int dist_pieces(const dist_sequences *s, int rank, int split, dist_piece *out)
{
    const int chunks = dist_chunks(s->ranks, s->placement);
    int count = 0;
    int64_t row = 0;
    for (int which = 0; which < 2; which++) {
        const int index = dist_chunk_of(s->ranks, rank, s->placement, which);
        if (index < 0)
            continue;
        const acr_rows rows = dist_chunk(s->q_len, chunks, index);
        count += cut(s, (dist_piece){row, rows.count, rows.first + s->diagonal}, split, out + count);
        row += rows.count;
    }
    return count;
}

/* ---- What is seen ------------------------------------------------------------------------------------------------ */

dist_keys dist_seen_of(const dist_sequences *s, const dist_piece *piece, int source)
{
    const int chunks = dist_chunks(s->ranks, s->placement);
    const int64_t end = piece->position + piece->rows;
    dist_keys seen = {0, 0, 0};
    for (int which = 0; which < 2; which++) {
        const int index = dist_chunk_of(s->ranks, source, s->placement, which);
        if (index < 0)
            continue;
        const acr_rows keys = dist_chunk(s->kv_len, chunks, index);
        if (!s->is_causal || piece->position >= keys.first + keys.count - 1) {
            seen.count += keys.count; /* every row sees all of them */
        } else if (keys.first < end) {
            seen.count += end - keys.first;
            seen.is_causal = 1;
        }
    }
    return seen;
}

dist_keys dist_seen(const dist_sequences *s, const dist_piece *piece)
{
    if (!s->is_causal)
        return (dist_keys){0, s->kv_len, 0};
    const int64_t first = s->window_left ? most(0, piece->position - s->window_left + 1) : 0;
    return (dist_keys){first, piece->position + piece->rows - first, 1};
}

acr_rows dist_needed(const dist_sequences *s, const dist_piece *pieces, int count, int index)
{
    const acr_rows chunk = dist_chunk(s->kv_len, dist_chunks(s->ranks, s->placement), index);
    int64_t first = chunk.first + chunk.count, end = chunk.first;
    for (int i = 0; i < count; i++) {
        const dist_keys seen = dist_seen(s, &pieces[i]);
        const int64_t from = most(seen.first, chunk.first),
                      to = least(seen.first + seen.count, chunk.first + chunk.count);
        if (from < to) {
            first = least(first, from);
            end = most(end, to);
        }
    }
    return first < end ? (acr_rows){first, end - first} : (acr_rows){chunk.first, 0};
}
