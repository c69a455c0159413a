/* References in a sealed memory file (workbench/check/reference_cache.h): what comes out is what was made, and nobody
 * can change it on the way. */
#include "support.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check/reference_cache.h"

/* Every kind of reference: all rows and some, lengths, a packed batch, scales of each head, gradients. */
static const struct {
    const char *problem;
    input_kind inputs;
    length_pattern lengths;
} shelved[] = {{"b2:h4/2:s40/70:d64", INPUT_NORMAL, LENGTHS_EDGES},
               {"b1:h8:s600:d64:causal", INPUT_HEAVY, LENGTHS_FULL},
               {"bf16:b3:h2:s33:d32:kvlens", INPUT_NORMAL, LENGTHS_EDGES},
               {"e4m3:b2:h2:s48:d64", INPUT_HEAD_SCALED, LENGTHS_FULL},
               {"b4:h2:s64:d64:bshd:packed", INPUT_NORMAL, LENGTHS_EDGES},
               {"f16:b3:h2:s5/70:d32:kv-e4m3:kvlens:page16", INPUT_HEAD_SCALED, LENGTHS_EDGES},
               {"bwd:b2:h4/2:s40/70:d32:kvlens:sinks", INPUT_NORMAL, LENGTHS_EDGES},
               {"bwd:b1:h1:s4100:d64:causal", INPUT_NORMAL, LENGTHS_FULL}};
enum {
    SHELVED = sizeof shelved / sizeof shelved[0]
};

typedef struct fixture {
    acr_problem problems[SHELVED];
    reference_request requests[SHELVED];
    int fd;
} fixture;

static int make_fixture(void **state)
{
    static fixture f;
    for (size_t i = 0; i < SHELVED; ++i) {
        f.problems[i] = canonical_of(shelved[i].problem);
        f.requests[i] = (reference_request){.problem = &f.problems[i],
                                            .inputs = shelved[i].inputs,
                                            .seed = 70 + i,
                                            .sampled_rows = REFERENCE_SAMPLED_ROWS,
                                            .lengths = shelved[i].lengths,
                                            .threads = 2};
    }
    assert_ok(reference_cache_make(&f.fd, f.requests, SHELVED, INT64_MAX));
    *state = &f;
    return 0;
}

static int free_fixture(void **state)
{
    const fixture *f = *state;
    close(f->fd);
    return 0;
}

/* Both there with the same bytes, or neither. */
static void assert_same(const void *a, const void *b, int64_t bytes)
{
    assert_int_equal(a == NULL, b == NULL);
    if (a) {
        assert_memory_equal(a, b, (size_t)bytes);
    }
}

static void assert_same_reference(const reference *a, const reference *b)
{
    const acr_problem *p = &a->problem;
    const int64_t number = 4;
    assert_memory_equal(&a->problem, &b->problem, sizeof a->problem);
    assert_int_equal(a->inputs, b->inputs);
    assert_int_equal(a->seed, b->seed);
    assert_int_equal(a->entries, b->entries);
    assert_int_equal(a->q_rows, b->q_rows);
    assert_int_equal(a->kv_rows, b->kv_rows);
    assert_int_equal(a->rows, b->rows);
    assert_int_equal(a->buffers.pages, b->buffers.pages);
    assert_int_equal(a->buffers.table_stride, b->buffers.table_stride);
    for (acr__buffer i = 0; i < ACR__DQ; i++) {
        const size_t field = acr__buffer_fields[i].in_buffers;
        const bool is_input = !acr__is_output(p, i);
        assert_same(acr__pointer_at(&a->buffers, field), acr__pointer_at(&b->buffers, field),
                    is_input ? acr__buffer_bytes(p, i, reference_extents(a)) : 0);
    }
    assert_int_equal(a->grads == NULL, b->grads == NULL);
    for (int i = 0; i < 4 && a->grads; i++) {
        const int64_t bytes = a->grads->elements[i] * (int64_t)sizeof(double);
        assert_int_equal(a->grads->elements[i], b->grads->elements[i]);
        assert_same(a->grads->expected[i], b->grads->expected[i], bytes);
        assert_same(a->grads->tolerance[i], b->grads->tolerance[i], bytes);
    }
    if (a->grads) {
        assert_same(a->grads->rows, b->grads->rows, a->entries * p->q_heads * a->q_rows);
        assert_same(a->grads->keys, b->grads->keys, a->entries * p->kv_heads * a->kv_rows);
    }
    assert_same(a->q_owner, b->q_owner, a->q_rows * number);
    assert_same(a->kv_owner, b->kv_owner, a->kv_rows * number);
    assert_same(a->row_list, b->row_list, a->rows * 2 * number);
    assert_same(a->o, b->o, a->rows * p->v_dim * 2 * number);
    assert_same(a->lse, b->lse, a->rows * 2 * number);
    assert_true(a->tol_max == b->tol_max && a->tol_rms == b->tol_rms && a->tol_lse == b->tol_lse &&
                a->tol_floor == b->tol_floor);
}

static void what_was_made_comes_out(void **state)
{
    const fixture *f = *state;
    reference_cache *s;
    bool sampled = false, lengths = false, offsets = false, scales = false, pages = false, some_keys = false,
         sinks = false;
    assert_ok(reference_cache_open(&s, f->fd));
    for (size_t i = 0; i < SHELVED; ++i) {
        reference *taken, *made;
        assert_ok(reference_cache_take(&taken, s, &f->requests[i]));
        assert_non_null(taken);
        assert_ok(reference_create(&made, &f->requests[i]));
        assert_same_reference(taken, made);
        sampled = sampled || made->row_list;
        lengths = lengths || made->buffers.kv_lens;
        offsets = offsets || made->buffers.q_offsets;
        scales = scales || made->buffers.q_scales;
        pages = pages || made->buffers.page_table;
        some_keys = some_keys || (made->grads && made->grads->keys);
        sinks = sinks || (made->grads && made->grads->elements[3] > 0);
        reference_destroy(made);
        reference_destroy(taken);
    }
    assert_true(sampled && lengths && offsets && scales && pages && some_keys && sinks);
    reference_cache_close(s);
}

static void another_request_is_not_there(void **state)
{
    const fixture *f = *state;
    const acr_problem longer = canonical_of("b2:h4/2:s41/70:d64");
    reference_request others[5];
    reference_cache *s;
    assert_ok(reference_cache_open(&s, f->fd));
    for (size_t i = 0; i < COUNT_OF(others); ++i) {
        others[i] = f->requests[0];
    }
    others[0].seed += 1;
    others[1].inputs = INPUT_LARGE;
    others[2].lengths = LENGTHS_FULL;
    others[3].sampled_rows = 1;
    others[4].problem = &longer;
    for (size_t i = 0; i < COUNT_OF(others); ++i) {
        reference *taken;
        assert_ok(reference_cache_take(&taken, s, &others[i]));
        assert_null(taken);
    }
    reference_cache_close(s);
}

/* As many of the first as fit. */
static void a_file_has_its_limit(void **state)
{
    const fixture *f = *state;
    reference_cache *s;
    int fd;
    reference *taken;
    assert_ok(reference_cache_make(&fd, f->requests, SHELVED, 512 << 10));
    assert_true(lseek(fd, 0, SEEK_END) <= 512 << 10);
    assert_ok(reference_cache_open(&s, fd));
    assert_ok(reference_cache_take(&taken, s, &f->requests[0]));
    assert_non_null(taken);
    reference_destroy(taken);
    assert_ok(reference_cache_take(&taken, s, &f->requests[1]));
    assert_null(taken);
    reference_cache_close(s);
    close(fd);
}

static void nobody_changes_it(void **state)
{
    const fixture *f = *state;
    const char byte = 1;
    assert_int_equal(pwrite(f->fd, &byte, 1, 0), -1);
    assert_int_equal(errno, EPERM);
    assert_int_equal(ftruncate(f->fd, 0), -1);
    assert_true(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, f->fd, 0) == MAP_FAILED);
    assert_int_equal(fcntl(f->fd, F_ADD_SEALS, F_SEAL_WRITE), -1);
    assert_true(fcntl(f->fd, F_GETFD) & FD_CLOEXEC);
    reference_cache *s;
    reference *taken;
    assert_ok(reference_cache_open(&s, f->fd));
    assert_ok(reference_cache_take(&taken, s, &f->requests[0]));
    assert_int_equal(mprotect(taken->mapping, taken->mapping_bytes, PROT_READ | PROT_WRITE), -1);
    reference_destroy(taken);
    reference_cache_close(s);
}

static void other_files_are_refused(void **state)
{
    (void)state;
    enum {
        SEALS = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE
    };
    reference_cache *s;
    const int open_file = memfd_create("open", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_true(open_file >= 0);
    assert_fails(reference_cache_open(&s, open_file), ACR_FORMAT, "no sealed memory file");
    assert_int_equal(ftruncate(open_file, 4096), 0);
    assert_int_equal(fcntl(open_file, F_ADD_SEALS, SEALS), 0);
    assert_fails(reference_cache_open(&s, open_file), ACR_FORMAT, "holds none");
    close(open_file);
    assert_fails(reference_cache_open(&s, open_file), ACR_FORMAT, "no sealed memory file");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_was_made_comes_out), cmocka_unit_test(another_request_is_not_there),
        cmocka_unit_test(a_file_has_its_limit),    cmocka_unit_test(nobody_changes_it),
        cmocka_unit_test(other_files_are_refused),
    };
    return cmocka_run_group_tests(tests, make_fixture, free_fixture);
}
