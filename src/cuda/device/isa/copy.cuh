/* Asynchronous copies from global to shared memory (cp.async, sm_80), and where they put 16 bytes in a swizzled
 * tile. */
#ifndef ACR_DEVICE_ISA_COPY_CUH
#define ACR_DEVICE_ISA_COPY_CUH

#include "cuda/device/isa/common.cuh"

enum {
    CHUNK_BYTES = 16,
    CHUNK_ELEMS = 8 /* of 16 bits */
};

/* Copies 16 bytes; with valid = 0 reads nothing, wherever `global` points, and writes zeros. */
DEV void copy_chunk_async(uint32_t smem, const void *global, int valid)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem), "l"(global), "r"(valid ? 16 : 0)
                 : "memory");
}

/* Copies the first 0 to 16 bytes of 16, and writes zeros for the rest. Both addresses are multiples of 16. */
DEV void copy_bytes_async(uint32_t smem, const void *global, int bytes)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem), "l"(global), "r"(bytes) : "memory");
}

/* Arrives at a barrier of sm_90 once all of this thread's copies so far have landed, without waiting for them. */
DEV void copies_arrive(uint32_t barrier)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

/* For copies of what this kernel reads once: the L2 cache gives it up before anything else. */
DEV uint64_t policy_read_once(void)
{
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

/* copy_chunk_async with a policy of the L2 cache. */
DEV void copy_chunk_async_by(uint32_t smem, const void *global, int valid, uint64_t policy)
{
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(smem), "l"(global),
                 "r"(valid ? 16 : 0), "l"(policy)
                 : "memory");
}

/* Closes the group of this thread's copies since the last commit. */
DEV void copies_commit(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Waits until at most `pending` of this thread's newest groups are still on their way. Other threads' copies need a
 * barrier as well. */
#define COPIES_WAIT(pending) asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory")

/* Byte offset of a 16-byte chunk in a tile whose rows hold `row_chunks` chunks. The chunk's number is XORed with the
 * row so that the eight rows of an 8x8 matrix, read by ldmatrix at one chunk number, lie in eight different bank groups
 * of 16 bytes: rows that are a multiple of 128 bytes all start in the same group and need three bits of the row; the
 * others (a multiple of 64) alternate between two halves by themselves and need two. row_chunks is a compile-time
 * multiple of 4. */
DEV uint32_t chunk_offset(int row, int chunk, int row_chunks)
{
    const int swizzled =
        row_chunks % 8 == 0 ? (chunk & ~7) | ((chunk ^ row) & 7) : (chunk & ~3) | ((chunk ^ row >> 1) & 3);
    return (uint32_t)((row * row_chunks + swizzled) * CHUNK_BYTES);
}

/* The address of a chunk in the row whose chunk 0 is at address `row_start` (tile + chunk_offset(row, 0, row_chunks)),
 * of a tile that starts at a multiple of 128 bytes: one XOR with a constant, where chunk_offset is many instructions or
 * a register for every chunk. */
DEV uint32_t chunk_address(uint32_t row_start, int chunk, int row_chunks)
{
    const int period = row_chunks % 8 == 0 ? 8 : 4;
    return (row_start ^ (uint32_t)(chunk % period * CHUNK_BYTES)) + (uint32_t)(chunk / period * period * CHUNK_BYTES);
}

#endif
