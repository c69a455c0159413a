/* What a plan is expected to take, and which schedule ACR_SCHEDULE_AUTO takes: attention by the library's own
 * estimates, transfers and copies by the link that wisdom knows. Nothing here allocates on a device or loads code. */
#include <math.h>
#include <stdio.h>

#include "error.h"
#include "plan.h"

double dist_plan_attention(const acr_group_plan *plan, int step)
{
    double seconds = 0.0;
    for (int i = 0; i < plan->call_count; i++)
        if (plan->calls[i].step == step)
            seconds += plan->kernels[plan->calls[i].kernel].seconds;
    return seconds;
}

/* A copy reads and writes; the merge reads every part and writes o. */
double dist_plan_merging(const acr_group_plan *plan, const acr_link *link, int64_t rows, int count)
{
    const acr_problem *p = &plan->problem;
    const size_t read = (size_t)count * dist_dtype_bytes(plan->part_dtype), written = dist_dtype_bytes(p->out_dtype);
    return (double)rows * (double)p->v_dim * (double)(read + written) / (2.0 * link->copy_bytes_per_s);
}

int dist_link_of(const acr_group *group, acr_link *out)
{
    return acr_wisdom_find_link(group->ctx, group->ranks, group->hosts, out) == ACR_OK;
}

/* Seconds of this rank by a schedule; INFINITY where no kernel can. Partial results have the type that they would have
 * if every rank were as this one. */
static acr_status estimate(const acr_group_plan *like, const dist_schedule *schedule, const acr_link *link, double *out)
{
    acr_group_plan plan = {.group = like->group,
                           .schedule = schedule,
                           .problem = like->problem,
                           .effort = ACR_ESTIMATE,
                           .is_estimate = 1,
                           .way = like->way,
                           .part_dtype = like->part_dtype,
                           .sequences = like->sequences};
    acr_status status = dist_plan_prepare(&plan);
    if (status == ACR_UNSUPPORTED && plan.part_dtype != plan.problem.out_dtype) {
        dist_plan_unprepare(&plan);
        plan.part_dtype = plan.problem.out_dtype;
        status = dist_plan_prepare(&plan);
    }
    *out = status == ACR_OK ? schedule->expect(&plan, link) : (double)INFINITY;
    dist_plan_unprepare(&plan);
    return status == ACR_UNSUPPORTED ? ACR_OK : status;
}

acr_status dist_plan_choose(acr_group_plan *plan, const dist_schedule *other)
{
    double seconds[DIST_VALUES] = {0.0};
    char objection[512] = "";
    acr_link link;
    acr_status status = ACR_OK;
    const int knows_link = dist_link_of(plan->group, &link);
    const char *text = knows_link ? "" : acr_last_error();
    if (knows_link)
        status = estimate(plan, plan->schedule, &link, &seconds[0]);
    if (knows_link && status == ACR_OK)
        status = estimate(plan, other, &link, &seconds[1]);
    if (status != ACR_OK)
        text = acr_group_last_error();
    status = dist_group_object(plan->group, status, text, seconds, objection, sizeof objection);
    if (status != ACR_OK)
        return status;
    const dist_schedule *first = plan->schedule;
    if (!*objection && seconds[1] < seconds[0])
        plan->schedule = other;
    if (*objection)
        snprintf(plan->choice, sizeof plan->choice, "by rule, not by time: %.480s", objection);
    else
        snprintf(plan->choice, sizeof plan->choice, "expected of the slowest rank: %s %.3f ms, %s %.3f ms", first->name,
                 seconds[0] * 1e3, other->name, seconds[1] * 1e3);
    return ACR_OK;
}
