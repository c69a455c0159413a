/* Measuring the link of several GPUs, see wisdom_link.h. */
#include "wisdom_link.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "acromion_nccl.h"
#include "base/exit_code.h"

typedef struct link_rank {
    const acr_group_id *id;
    const char *library;
    acr_ctx *ctx;
    int rank, ranks;
    pthread_t thread;
    acr_link link;
    acr_status status;
    char text[512];
} link_rank;

static void *measure(void *arg)
{
    link_rank *r = arg;
    acr_group_options options = ACR_GROUP_OPTIONS_INIT;
    acr_group *group = NULL;
    options.rank = r->rank;
    options.ranks = r->ranks;
    options.device = strcmp(acr_ctx_backend(r->ctx), "cuda") == 0 ? r->rank : 0;
    options.id = r->id;
    options.library = r->library;
    r->status = acr_group_create(&group, r->ctx, &options);
    if (r->status == ACR_OK) {
        r->status = acr_group_measure_link(group, &r->link);
    }
    if (r->status != ACR_OK) {
        snprintf(r->text, sizeof r->text, "%s", acr_group_last_error());
    }
    acr_group_destroy(group);
    return NULL;
}

/* Every rank at once: those that started wait for one that did not no longer than the group's time limit. */
static int measure_all(link_rank *ranks, int count)
{
    int started = 0;
    while (started < count && pthread_create(&ranks[started].thread, NULL, measure, &ranks[started]) == 0) {
        ++started;
    }
    for (int i = 0; i < started; ++i) {
        pthread_join(ranks[i].thread, NULL);
    }
    if (started < count) {
        fprintf(stderr, "acromion wisdom link: no thread for rank %d\n", started);
        return EXIT_CANNOT_RUN;
    }
    for (int i = 0; i < count; ++i) {
        if (ranks[i].status != ACR_OK) {
            fprintf(stderr, "acromion wisdom link: rank %d: %s\n", i, ranks[i].text);
            return ranks[i].status == ACR_NO_DEVICE ? EXIT_CANNOT_RUN : EXIT_FAILED;
        }
    }
    return EXIT_DONE;
}

static int measure_over(link_rank *ranks, int count, const common_options *common, const char *library)
{
    acr_group_id id;
    const acr_status status = acr_group_id_create(&id, library);
    if (status != ACR_OK) {
        fprintf(stderr, "acromion wisdom link: %s\n", acr_group_last_error());
        return EXIT_CANNOT_RUN;
    }
    for (int i = 0; i < count; ++i) {
        common_options own = *common;
        ranks[i] = (link_rank){.id = &id, .library = library, .rank = i, .ranks = count};
        own.device = i > 0 && strcmp(acr_ctx_backend(ranks[0].ctx), "cuda") != 0 ? 0 : i;
        const int exit_code = context_open(&own, &ranks[i].ctx);
        if (exit_code != EXIT_DONE) {
            return exit_code;
        }
    }
    return measure_all(ranks, count);
}

int wisdom_link(const common_options *common, int count, const char *library, acr_ctx **out, acr_link *link)
{
    link_rank *ranks = calloc((size_t)count, sizeof *ranks);
    if (!ranks) {
        fprintf(stderr, "acromion wisdom link: out of memory\n");
        return EXIT_FAILED;
    }
    const int exit_code = measure_over(ranks, count, common, library);
    for (int i = exit_code == EXIT_DONE; i < count; ++i) {
        acr_ctx_destroy(ranks[i].ctx);
    }
    if (exit_code == EXIT_DONE) {
        *out = ranks[0].ctx;
        *link = ranks[0].link;
    }
    free(ranks);
    return exit_code;
}
