/* The gate's lists of cases: complete for every kernel of the table, and with decoding in all its forms for the kernels
 * that split the keys. */
#include <stdio.h>
#include <string.h>

#include "check/cases.h"
#include "devices.h"
#include "support.h"

static case_list list; /* too large for the stack */

static const acr__device *find_device(const char *label)
{
    for (int i = 0; i < TEST_DEVICES; i++)
        if (strcmp(test_devices[i].label, label) == 0)
            return &test_devices[i].device;
    fail_msg("no test device %s", label);
    return NULL;
}

/* Every pair of values occurs, or cannot; CASES_MAX cuts nothing off. */
static void lists_cover_every_pair(void **state)
{
    (void)state;
    const acr__device *device = find_device("h200");
    for (size_t i = 0; i < acr__kernel_count; i++) {
        const acr__kernel *kernel = acr__kernels[i];
        if (kernel->backend != ACR__CUDA)
            continue;
        cases_make(&list, kernel, device, false);
        if (list.count == 0 || list.pairs_covered + list.pairs_impossible != list.pairs)
            fail_msg("%s: %zu cases, %zu of %zu pairs, %zu impossible", kernel->name, list.count, list.pairs_covered,
                     list.pairs, list.pairs_impossible);
    }
}

typedef struct seen {
    int group_1, group_4, group_8, one_query, key_lengths, causal, causal_top_left, many_splits;
    unsigned clusters; /* the sizes that occur, all powers of two */
} seen;

static void look_at(seen *s, const acr__kernel *kernel, const acr_problem *p, const acr__device *device)
{
    acr__launch launch;
    kernel->shape(p, device, &launch);
    const int64_t group = p->q_heads / p->kv_heads;
    const uint32_t splits = launch.grid[0]; /* CTAs that share the keys of a tile of query rows */
    s->clusters |= launch.cluster;
    if (p->q_len > 16 || splits < 2)
        return;
    s->group_1 += group == 1;
    s->group_4 += group == 4;
    s->group_8 += group == 8;
    s->one_query += p->q_len == 1;
    s->key_lengths += (p->flags & ACR_KV_LENS) != 0 && p->batch > 1; /* of none, one, some, all and more: splits without
                                                                        a key */
    s->causal += p->mask == ACR_MASK_CAUSAL && p->q_len > 1;
    s->causal_top_left += p->mask == ACR_MASK_CAUSAL_TOP_LEFT;
    s->many_splits += splits > 32; /* more than the lanes of a warp */
}

static void splitting_kernels_meet_decoding(void **state)
{
    (void)state;
    if (!has_cuda_kernels())
        skip();
    const acr__device *device = find_device("h200");
    int kernels = 0;
    for (size_t i = 0; i < acr__kernel_count; i++) {
        const acr__kernel *kernel = acr__kernels[i];
        const bool by_clusters = strcmp(kernel->family, "fwd_decode") == 0;
        if ((!by_clusters && strcmp(kernel->family, "fwd_split") != 0))
            continue;
        seen s = {0};
        kernels++;
        cases_make(&list, kernel, device, false);
        for (size_t c = 0; c < list.count; c++)
            look_at(&s, kernel, &list.items[c].problem, device);
        if (!s.group_1 || !s.group_4 || !s.group_8 || !s.one_query || !s.key_lengths || !s.causal ||
            !s.causal_top_left || (!by_clusters && !s.many_splits))
            fail_msg(
                "%s: no split case with: group 1 %d, 4 %d, 8 %d, one query %d, key lengths %d, causal %d, top-left "
                "%d, many splits %d",
                kernel->name, s.group_1, s.group_4, s.group_8, s.one_query, s.key_lengths, s.causal, s.causal_top_left,
                s.many_splits);
        if (by_clusters && s.clusters != (kernel->qk_dim_max == 256 ? 14 : 15)) /* 8, 4, 2 and CTAs alone */
            fail_msg("%s: clusters of these sizes alone: %#x", kernel->name, s.clusters);
    }
    assert_true(kernels > 0);
}

/* A line that is compiled for caches, or for values inside keys, is tried with them. */
static void lines_meet_what_they_are_for(void **state)
{
    (void)state;
    const acr__device *device = find_device("h200");
    for (size_t i = 0; i < acr__kernel_count; i++) {
        const acr__kernel *kernel = acr__kernels[i];
        if (kernel->backend != ACR__CUDA)
            continue;
        int pages = 0, values_in_keys = 0;
        cases_make(&list, kernel, device, false);
        for (size_t c = 0; c < list.count; c++) {
            pages += list.items[c].problem.page != 0;
            values_in_keys += (list.items[c].problem.flags & ACR_V_IN_K) != 0;
        }
        if ((kernel->pages && pages == 0) || (kernel->v_in_k && values_in_keys == 0))
            fail_msg("%s: of %zu cases %d have pages, %d values inside keys", kernel->name, list.count, pages,
                     values_in_keys);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lists_cover_every_pair),
        cmocka_unit_test(splitting_kernels_meet_decoding),
        cmocka_unit_test(lines_meet_what_they_are_for),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
