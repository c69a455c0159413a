/* Where a batch entry's rows are: the whole of a dimension, cut by its key length, or a sequence of a packed batch. For
 * the families with ACR__TRAIT_PACKED; the others need keys.cuh only. */
#ifndef ACR_DEVICE_ATTENTION_SEQUENCE_CUH
#define ACR_DEVICE_ATTENTION_SEQUENCE_CUH

#include "cuda/device/attention/visible.cuh"

typedef struct sequence {
    int q_begin, q_len;   /* rows of q and o, from the entry's own first on (batch strides are 0 where it is not 0) */
    int kv_begin, kv_len; /* of k and v */
} sequence;

/* A family that is compiled apart for packed batches says by PACKED which this is; the others look. */
DEV bool is_packed(const fwd_args &a)
{
#ifdef PACKED
    return PACKED;
#else
    return a.q_offsets != nullptr;
#endif
}

/* Rows offsets[entry] to offsets[entry + 1], no more than length_max, whatever the offsets hold. */
DEV void find_rows(int &begin, int &length, const int32_t *offsets, int entry, int total, int length_max)
{
    begin = min(max(offsets[entry], 0), total);
    length = min(min(max(offsets[entry + 1], begin), total) - begin, length_max);
}

/* Reads global memory: kv_lens or the offsets. */
DEV sequence find_sequence(const fwd_args &a, int batch)
{
    sequence s = {0, a.q_len, 0, a.kv_len};
    if (is_packed(a)) {
        find_rows(s.q_begin, s.q_len, a.q_offsets, batch, a.q_total, a.q_len);
        find_rows(s.kv_begin, s.kv_len, a.kv_offsets, batch, a.kv_total, a.kv_len);
    } else if (a.kv_lens != nullptr) {
        s.kv_len = min(max(a.kv_lens[batch], 0), a.kv_len);
    }
    return s;
}

/* The keys that some rows of a sequence see, from q_first on. Rows behind the sequence's end see perhaps more keys than
 * its last row, never others than its own. */
DEV keys sequence_keys(const fwd_args &a, const sequence &s, int q_first, int rows)
{
    keys k;
    k.len = s.kv_len;
    k.diagonal = a.mask == FWD_MASK_BOTTOM_RIGHT ? s.kv_len - s.q_len : 0;
    k.end = keys_seen(a, k, q_first + rows - 1);
    k.full_end = keys_seen(a, k, q_first);
    return k;
}

/* Where the log-sum-exp of a sequence's first row is. */
DEV float *find_lse(const fwd_args &a, const sequence &s, int batch, int head)
{
    return is_packed(a) ? a.lse + (int64_t)head * a.q_total + s.q_begin
                        : a.lse + ((int64_t)batch * a.q_heads + head) * a.q_len;
}

#endif
