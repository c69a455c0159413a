/* Where the keys and values of a paged or 8-bit cache lie: what a kernel is told beside fwd_args. On the CPU it lies
 * behind them; a line for GPUs that is compiled with paging has it as its second parameter, so that the arguments of
 * all other lines stay as they are.
 *
 * Key j of batch entry b is row j % page of page table[b * table_stride + j / page]; k and v are then [pages, page,
 * kv_heads, dim] by their strides, whose batch is the page's. Table entries from ceil(key length / page) on are not
 * read. A number outside [0, pages) names no page: nothing is read for it, and what becomes of that batch entry's rows
 * is left open, but they are its own. */
#ifndef ACR_FWD_PAGING_H
#define ACR_FWD_PAGING_H

#include <stddef.h>

#include "fwd_args.h"

/* What is 0 or NULL is not there. */
typedef struct fwd_paging {
    const int32_t *table; /* NULL: the keys lie one after another */
    int64_t table_stride; /* from one batch entry's pages to the next one's */
    int32_t page, pages;  /* keys in a page; pages that k and v hold */
    int32_t kv_type;      /* an acr_dtype, of k and v where it is another than q's */
    int32_t invariant;    /* 1: a row's bits depend on its own keys alone (ACR_INVARIANT) */
} fwd_paging;

#ifndef __CUDACC__

typedef struct fwd_paged_args {
    fwd_args fwd; /* fwd.paged is 1 */
    fwd_paging paging;
} fwd_paged_args;

/* Of any arguments of a forward kernel: zeros where there is nothing to say. */
static inline fwd_paging fwd_paging_of(const fwd_args *args)
{
    return args->paged ? ((const fwd_paged_args *)(const void *)args)->paging : (fwd_paging){.table = NULL};
}

#endif

#endif
