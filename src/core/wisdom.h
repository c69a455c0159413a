/* Wisdom: what measuring taught. A table of facts, keyed by device and problem text, and its text file. */
#ifndef ACR_WISDOM_H
#define ACR_WISDOM_H

#include <stdbool.h>

#include "kernel.h"

enum {
    WISDOM_DEVICE_MAX = 160,
    WISDOM_KERNEL_MAX = 96
};

/* For this problem on this device, this kernel won. */
typedef struct acr__fact {
    char problem[ACR_PROBLEM_TEXT_MAX]; /* as acr__wisdom_problem says it */
    char kernel[WISDOM_KERNEL_MAX];
    uint64_t digest;   /* of the kernel's machine code when it was measured */
    acr_effort effort; /* ACR_MEASURE or ACR_PATIENT */
    double median_ns;  /* of one execution in stream mode */
    double mad_ns;     /* median absolute deviation of the samples */
    uint32_t samples;
} acr__fact;

typedef struct acr__wisdom acr__wisdom; /* the facts about one device; not locked: the context does that */

/* What a device is called in wisdom: its name and whatever else times depend on. */
void acr__wisdom_device_key(const acr__device *device, char key[WISDOM_DEVICE_MAX]);

/* NULL when out of memory. */
acr__wisdom *acr__wisdom_create(const acr__device *device);
void acr__wisdom_destroy(acr__wisdom *wisdom);
void acr__wisdom_clear(acr__wisdom *wisdom);

/* What a problem is called in wisdom: its canonical text, with cap1 for every softcap: no value selects a kernel. */
acr_status acr__wisdom_problem(char text[ACR_PROBLEM_TEXT_MAX], const acr_problem *problem);

/* Why a link is none that wisdom can hold: a field, its value and the limit. NULL where it is. Valid until the thread's
 * next call. */
const char *acr__link_why_not(const acr_link *link);

/* The link of so many ranks and hosts, or NULL. Valid until the table changes. */
const acr_link *acr__wisdom_find_link(const acr__wisdom *wisdom, int32_t ranks, int32_t hosts);

/* Adds a link, or replaces that of as many ranks and hosts. */
acr_status acr__wisdom_put_link(acr__wisdom *wisdom, const acr_link *link);

/* The fact about a problem, called as acr__wisdom_problem says, or NULL. Valid until the table changes. */
const acr__fact *acr__wisdom_find(const acr__wisdom *wisdom, const char *problem);

/* Adds a fact; it replaces one of lower or equal effort, and gives way to one of higher. */
acr_status acr__wisdom_put(acr__wisdom *wisdom, const acr__fact *fact);

/* True when a fact can be used here: its kernel exists with the same machine code and can run the problem on the
 * device. */
bool acr__wisdom_usable(const acr__fact *fact, const acr__device *device);

/* The bodies of acr_wisdom_import and acr_wisdom_export. */
acr_status acr__wisdom_read(acr__wisdom *wisdom, const acr__device *device, const char *path,
                            acr_wisdom_report *report);
acr_status acr__wisdom_write(const acr__wisdom *wisdom, const char *path);

/* Checks a wisdom text held in memory, bytes long, as an import does, and counts its facts, links too. For the fuzzer
 * and `acromion wisdom verify`. */
acr_status acr__wisdom_check(const char *text, size_t bytes, uint32_t *facts);

/* Calls fact for every fact of a text and link for every link, with the key of the device; NULL: they are skipped.
 * Stops at the first status that is not ACR_OK and returns it. */
typedef struct acr__wisdom_visitor {
    acr_status (*fact)(void *user, const char *device_key, const acr__fact *fact);
    acr_status (*link)(void *user, const char *device_key, const acr_link *link);
} acr__wisdom_visitor;
acr_status acr__wisdom_parse(const char *text, size_t bytes, const acr__wisdom_visitor *visitor, void *user);

#endif
