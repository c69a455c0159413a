/* What a function that reads the cache is told besides: in lines that are compiled for pages (PAGED) where those are,
 * else nothing. A family includes this once, behind its PAGED. */
#ifndef ACR_DEVICE_ATTENTION_PAGING_ARGUMENT_CUH
#define ACR_DEVICE_ATTENTION_PAGING_ARGUMENT_CUH

#if PAGED
#define PAGING_PARAMETER , const fwd_paging &paging
#define PAGING_ARGUMENT , paging
#else
#define PAGING_PARAMETER
#define PAGING_ARGUMENT
#endif

#endif
