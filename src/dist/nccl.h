/* NCCL, loaded with dlopen: what is used of it, declared here so that no NCCL header is needed. The declarations are
 * those of NCCL 2.18, which later versions accept. */
#ifndef ACR_DIST_NCCL_H
#define ACR_DIST_NCCL_H

#include <acromion_nccl.h>
#include <limits.h>

typedef struct dist_comm dist_comm; /* ncclComm */

typedef enum nccl_result {
    NCCL_SUCCESS, /* 0, and so on */
    NCCL_CUDA_ERROR,
    NCCL_SYSTEM_ERROR,
    NCCL_INTERNAL_ERROR,
    NCCL_INVALID_ARGUMENT,
    NCCL_INVALID_USAGE,
    NCCL_REMOTE_ERROR,
    NCCL_IN_PROGRESS
} nccl_result;

enum {
    NCCL_UINT8 = 1 /* of ncclDataType_t: everything travels as bytes */
};

/* ncclConfig_t. A field that is NCCL_UNDEFINED is NCCL's to choose. */
typedef struct nccl_config {
    size_t size;
    unsigned magic, version;
    int blocking, cga_cluster_size, min_ctas, max_ctas;
    const char *net_name;
    int split_share;
} nccl_config;

#define NCCL_UNDEFINED INT_MIN
#define NCCL_CONFIG_INIT                                                                                               \
    {                                                                                                                  \
        sizeof(nccl_config), 0xcafebeef, 21800, NCCL_UNDEFINED, NCCL_UNDEFINED, NCCL_UNDEFINED, NCCL_UNDEFINED, NULL,  \
            NCCL_UNDEFINED                                                                                             \
    }

/* The oldest NCCL served: 2.18. */
#define NCCL_VERSION_MIN 21800

/* X(name without nccl, arguments) */
#define NCCL_ENTRIES(X)                                                                                                \
    X(GetVersion, (int *version))                                                                                      \
    X(GetUniqueId, (acr_group_id * id))                                                                                \
    X(CommInitRankConfig, (dist_comm * *comm, int ranks, acr_group_id id, int rank, nccl_config *config))              \
    X(CommDestroy, (dist_comm * comm))                                                                                 \
    X(CommAbort, (dist_comm * comm))                                                                                   \
    X(CommGetAsyncError, (dist_comm * comm, nccl_result * error))                                                      \
    X(CommCount, (const dist_comm *comm, int *count))                                                                  \
    X(CommUserRank, (const dist_comm *comm, int *rank))                                                                \
    X(AllGather, (const void *send, void *receive, size_t count, int type, dist_comm *comm, void *stream))             \
    X(Send, (const void *data, size_t count, int type, int peer, dist_comm *comm, void *stream))                       \
    X(Recv, (void *data, size_t count, int type, int peer, dist_comm *comm, void *stream))                             \
    X(GroupStart, (void))                                                                                              \
    X(GroupEnd, (void))

typedef struct dist_nccl {
    int version; /* 22805 = 2.28.5 */
    const char *(*GetLastError)(const dist_comm *comm);
#define NCCL_FIELD(name, arguments) nccl_result(*name) arguments;
    NCCL_ENTRIES(NCCL_FIELD)
#undef NCCL_FIELD
} dist_nccl;

/* Loads a library, NULL = "libnccl.so.2", and finds every entry. It stays loaded for ever, since its threads run its
 * code. Errors: ACR_NO_DEVICE. */
acr_status dist_nccl_open(dist_nccl *nccl, const char *library);

const char *dist_nccl_text(nccl_result result);

/* What a failure means to a caller: ACR_PEER where another rank caused it, else ACR_DEVICE_FAULT. */
acr_status dist_nccl_status(nccl_result result);

#endif
