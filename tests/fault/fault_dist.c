/* libacromion_nccl without memory: each call either succeeds or says ACR_NO_MEMORY, writes none of its outputs, and
 * gives back all that it took. One rank over the fake NCCL, whose own memory is not counted.
 * Argument: the fake NCCL. */
#include "support.h"

#include "dist/group.h"
#include "faults.h"

enum {
    PLACES_MAX = 200
};

static const char *library;

typedef struct scene {
    acr_ctx *ctx;
    acr_group_id id;
    acr_group *group;
    acr_problem problem;
    acr_schedule schedule;
} scene;

static acr_status open_group(const scene *s, acr_group **out)
{
    acr_group_options options = ACR_GROUP_OPTIONS_INIT;
    options.ranks = 1;
    options.id = &s->id;
    options.library = library;
    return acr_group_create(out, s->ctx, &options);
}

static acr_status create_group(const scene *s)
{
    acr_group *const untouched = (acr_group *)(uintptr_t)64, *group = untouched;
    const acr_status status = open_group(s, &group);
    if (status == ACR_OK)
        acr_group_destroy(group);
    else
        assert_ptr_equal(group, untouched);
    return status;
}

static acr_status create_plan(const scene *s)
{
    acr_group_plan *const untouched = (acr_group_plan *)(uintptr_t)64, *plan = untouched;
    const acr_status status =
        acr_group_plan_create(&plan, s->group, &s->problem, s->schedule, ACR_CONTIGUOUS, ACR_ESTIMATE);
    if (status == ACR_OK)
        acr_group_plan_destroy(plan);
    else
        assert_ptr_equal(plan, untouched);
    return status;
}

/* Fails each allocation of a call in turn until it gets through untouched. */
static void fail_everywhere(acr_status (*call)(const scene *s), const scene *s)
{
    int place = 0;
    for (bool fired = true; fired && place < PLACES_MAX;) {
        const int64_t blocks = fault_live_blocks();
        fault_arm(FAULT_MEMORY, ++place);
        const acr_status status = call(s);
        fired = fault_fired();
        fault_arm(FAULT_MEMORY, 0);
        if (status != (fired ? ACR_NO_MEMORY : ACR_OK))
            fail_msg("place %d: status %d (%s)", place, (int)status, acr_group_last_error());
        if (fault_live_blocks() != blocks)
            fail_msg("place %d: %lld blocks were left", place, (long long)(fault_live_blocks() - blocks));
    }
    assert_in_range(place, 2, PLACES_MAX - 1); /* there was something to fail */
}

static scene scene_make(void)
{
    scene s = {.ctx = cpu_ctx(1)};
    assert_int_equal(acr_group_id_create(&s.id, library), ACR_OK);
    return s;
}

static void groups_survive_lack_of_memory(void **state)
{
    (void)state;
    const scene s = scene_make();
    fail_everywhere(create_group, &s);
    acr_ctx_destroy(s.ctx);
}

static void plans_survive_lack_of_memory(void **state)
{
    (void)state;
    static const acr_schedule schedules[] = {ACR_RING, ACR_GATHER};
    for (size_t i = 0; i < COUNT_OF(schedules); i++) {
        scene s = scene_make();
        assert_int_equal(open_group(&s, &s.group), ACR_OK);
        s.problem = problem_of("f32:b1:h2:s64:d16:causal");
        s.schedule = schedules[i];
        fail_everywhere(create_plan, &s);
        acr_group_destroy(s.group);
        acr_ctx_destroy(s.ctx);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(groups_survive_lack_of_memory),
        cmocka_unit_test(plans_survive_lack_of_memory),
    };
    if (argc != 2)
        return 2;
    library = argv[1];
    return cmocka_run_group_tests(tests, NULL, NULL);
}
