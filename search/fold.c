/* The state of a run, see fold.h. */
#include "fold.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"

bool fold_point(const space_list *spaces, const char *family, const char *arch, const char *parameters, genome *out)
{
    for (int i = 0; i < spaces->count; ++i) {
        char reason[SPACE_REASON_MAX];
        genome g = {.space = i};
        if (strcmp(spaces->items[i].family, family) == 0 &&
            space_point(&spaces->items[i], arch, parameters, &g, reason)) {
            *out = g;
            return true;
        }
    }
    return false;
}

int64_t fold_find(const fold *f, trial_arm arm, const char *identity)
{
    for (size_t i = 0; i < f->identity_count; ++i) {
        if (f->identities[i].arm == arm && strcmp(f->identities[i].text, identity) == 0) {
            return f->identities[i].trial;
        }
    }
    return -1;
}

static bool note_identity(fold *f, trial_arm arm, int64_t trial, const char *identity)
{
    known_identity *identities =
        room_for_one(f->identities, f->identity_count, &f->identity_capacity, sizeof *identities);
    if (!identities) {
        return false;
    }
    f->identities = identities;
    known_identity *known = &f->identities[f->identity_count++];
    *known = (known_identity){.arm = arm, .trial = trial};
    snprintf(known->text, sizeof known->text, "%s", identity);
    return true;
}

static member member_of(const fold *f, const trial_view *v)
{
    member m = {
        .trial = v->row.id,
        .distinct = v->distinct,
        .valid = v->finished && strcmp(v->status, trial_status_name(TRIAL_VALID)) == 0,
        .speedup = v->speedup,
        .low = v->low,
        .high = v->high,
        .noise_floor = v->noise_floor,
        .verdict = v->verdict,
        .spill_bytes = v->resources.spill_bytes,
        .registers = v->resources.registers,
        .smem_bytes = v->resources.smem_bytes,
        .confirmations = v->confirmations,
        .confirmed = v->confirmed,
    };
    snprintf(m.cell, sizeof m.cell, "%s", v->row.cell);
    m.has_genome = !v->row.source && fold_point(f->spaces, v->row.family, v->row.arch, v->row.parameters, &m.genome);
    return m;
}

/* What a finished trial adds to the counts. */
typedef struct finished {
    const char *status, *kernel;
    bool distinct, improved;
    double speedup;
} finished;

static void count_finished(fold *f, trial_arm arm, const finished *t)
{
    arm_counts *c = &f->counts[arm];
    bool no_candidate = strncmp(t->status, "propos", strlen("propos")) == 0;
    c->distinct += t->distinct;
    c->valid += strcmp(t->status, trial_status_name(TRIAL_VALID)) == 0;
    c->improved += t->improved;
    bool duplicate = strcmp(t->status, trial_status_name(TRIAL_DUPLICATE)) == 0;
    c->failures_in_a_row = no_candidate || duplicate ? c->failures_in_a_row + 1 : 0;
    if (t->improved) {
        c->best_speedup = t->speedup;
        snprintf(f->best_kernels[arm], WISDOM_KERNEL_MAX, "%s", t->kernel);
        c->best_kernel = f->best_kernels[arm];
    }
}

acr_status fold_finish(fold *f, trial_arm arm, const char *kernel, const trial_end *end)
{
    const trial_result *r = end->result;
    const finished t = {end->status, kernel, end->distinct, end->improved, r ? r->overall.speedup : NAN};
    count_finished(f, arm, &t);
    bool noted = !r || !r->identity[0] || end->original >= 0 || note_identity(f, arm, end->id, r->identity);
    return noted ? ACR_OK : acr__fail(ACR_NO_MEMORY, "no memory for the identities");
}

static acr_status add_flight(fold *f, const trial_view *v)
{
    flight *flights = realloc(f->flights, (f->flight_count + 1) * sizeof *flights);
    if (!flights) {
        return acr__fail(ACR_NO_MEMORY, "no memory for the trials in flight");
    }
    f->flights = flights;
    flight *added = &flights[f->flight_count];
    *added = (flight){.id = v->row.id, .arm = v->row.arm, .device = -1};
    snprintf(added->kernel, sizeof added->kernel, "%s", v->row.kernel);
    trial_result_init(&added->result);
    ++f->flight_count;
    return v->row.source ? candidate_of_source(&added->candidate, v->row.family, v->row.arch, v->row.parameters,
                                               v->row.source, v->row.descriptor)
                         : candidate_of_family(&added->candidate, v->row.family, v->row.arch, v->row.parameters);
}

typedef struct visit_state {
    fold *fold;
    acr_status status;
} visit_state;

static bool visit(void *arg, const trial_view *v)
{
    visit_state *state = arg;
    fold *f = state->fold;
    member m = member_of(f, v);
    bool room = archive_add(&f->proposed[v->row.arm], &m);
    ++f->counts[v->row.arm].proposed;
    f->next_id = v->row.id + 1;
    f->next_round = v->row.round + 1;
    if (v->finished) {
        room = room && archive_add(&f->learnt[v->row.arm], &m);
        room = room && (!v->identity || v->original >= 0 || note_identity(f, v->row.arm, v->row.id, v->identity));
        const finished t = {v->status, v->row.kernel, v->distinct, v->improved, v->speedup};
        count_finished(f, v->row.arm, &t);
    } else if (room) {
        state->status = add_flight(f, v);
    }
    if (!room) {
        state->status = acr__fail(ACR_NO_MEMORY, "no memory for the archive");
    }
    return state->status == ACR_OK;
}

static acr_status add_incumbent(fold *f, const definition *d)
{
    member m = {.valid = true,
                .speedup = 1.0,
                .low = 1.0,
                .high = 1.0,
                .noise_floor = 0.01,
                .verdict = STATS_SAME,
                .spill_bytes = -1,
                .registers = -1,
                .smem_bytes = -1};
    const candidate *c = &d->incumbent;
    m.has_genome = fold_point(f->spaces, c->family, c->arch, c->parameters, &m.genome);
    if (m.has_genome) {
        space_cell(&f->spaces->items[m.genome.space], &m.genome, m.cell);
    }
    for (int arm = 0; arm < ARM_COUNT; ++arm) {
        if (!archive_add(&f->learnt[arm], &m)) {
            return acr__fail(ACR_NO_MEMORY, "no memory for the archive");
        }
    }
    return ACR_OK;
}

acr_status fold_read(fold *out, store *s, const definition *d, const space_list *spaces)
{
    *out = (fold){.spaces = spaces, .next_id = 1};
    for (int arm = 0; arm < ARM_COUNT; ++arm) {
        out->counts[arm].best_speedup = 1.0;
    }
    visit_state state = {out, add_incumbent(out, d)};
    acr_status status = state.status == ACR_OK ? store_trials(s, visit, &state) : state.status;
    status = status == ACR_OK ? state.status : status;
    if (status != ACR_OK) {
        fold_free(out);
    }
    return status;
}

void fold_free(fold *f)
{
    for (int arm = 0; arm < ARM_COUNT; ++arm) {
        archive_free(&f->learnt[arm]);
        archive_free(&f->proposed[arm]);
    }
    for (size_t i = 0; i < f->flight_count; ++i) {
        candidate_free(&f->flights[i].candidate);
        artefact_free(f->flights[i].artefact);
        trial_result_free(&f->flights[i].result);
    }
    free(f->flights);
    free(f->identities);
    *f = (fold){.spaces = NULL};
}
