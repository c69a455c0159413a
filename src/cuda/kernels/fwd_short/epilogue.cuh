/* How fwd_short's rows leave: finished rows to global memory, log-sum-exp, and the NaN fix-up. */
#ifndef ACR_CUDA_FWD_SHORT_EPILOGUE_CUH
#define ACR_CUDA_FWD_SHORT_EPILOGUE_CUH

#include "cuda/device/attention/epilogue.cuh"
#include "cuda/device/isa/global.cuh"
#include "cuda/kernels/fwd_short/merge.cuh"

enum {
    ELEMENT = E4M3 ? ACR_E4M3 : BF16 ? ACR_BF16 : ACR_F16,
    OUT_ELEMENT = E4M3 ? ACR_BF16_OR_F16 : ELEMENT
};

/* Where the lane's rows go. Computed before the products, since the first read of a kernel parameter takes as long as
 * one of L2. */
DEV void locate_rows(row_results &f, const fwd_args &a, const tile &t, const consumer &c)
{
    f.v_dim = a.v_dim;
    if (E4M3) {
        f.scale = scales_of(a, t).out;
        f.bf16 = a.out_bf16;
    }
#pragma unroll
    for (int out = 0; out < OUT_ROWS; out++) {
        const int bottom = half_of(c, out);
        f.row[out] = (bottom ? t.first[1] : t.first[0]) + 8 * c.warp + c.lane / 4;
        /* rows that are held twice are stored once */
        f.present[out] = f.row[out] < a.q_len &&
                         (bottom ? ONE_HALF || t.first[0] < t.first[1] : !ONE_HALF && t.first[0] <= t.first[1]);
        f.o[out] = (char *)a.o + output_index(a, t.rows, t.batch, t.head, f.row[out]) * OUT_BYTES;
        asm volatile("" : "+l"(f.o[out]), "+r"(f.v_dim), "+r"(f.present[out])); /* here, not where they are needed */
    }
}

/* Eight rows of a warp, from fragments through the place where its rows of Q were to 16-byte stores, 64 bytes of a row
 * at a time. */
DEV void store_rows(const consumer &c, const uint32_t (&packed)[DIM / 8], const row_results &f, const int out)
{
    const uint32_t rows_at = c.q_at + half_of(c, out) % HALVES * Q_HALF_BYTES + c.warp * SWIZZLE_ROWS_BYTES;
#pragma unroll
    for (int i = 0; i < DIM / 32; i++) {
        const int row = c.lane % 8, piece = i % 2 * 4 + c.lane / 8; /* of 16 bytes in the panel's row */
        store_matrices(rows_at + i / 2 * Q_PANEL_BYTES + row * PANEL_ROW_BYTES + ((piece ^ row) << 4), packed + 4 * i);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < DIM / 32; i++) {
        /* odd rows take their halves the other way around: no two lanes in one bank */
        const int row = c.lane / 4, piece = (i % 2 * 4 + c.lane % 4) ^ (row % 2 * 4),
                  column = i / 2 * PANEL_ELEMS + piece * 8;
        const uint4 v = load_shared_4(rows_at + i / 2 * Q_PANEL_BYTES + row * PANEL_ROW_BYTES + ((piece ^ row) << 4));
        if (f.present[out] && column < f.v_dim)
            store_global_4(f.o[out] + column * OUT_BYTES, v);
    }
}

/* Finishes and stores the rows whose output is in o. */
DEV void store_output_rows(const consumer &c, uint32_t (&packed)[OUT_ROWS][DIM / 8], const output_tile &o,
                           const row_results &f)
{
    ACR_TRACE_POINT(0, "last product done");
    if (!SHARED_ROWS)
#pragma unroll
        for (int row = 0; row < OUT_ROWS; row++)
            pack_row(packed[row], o, f, row);
    else {
        if (c.index == 0)
            send_part(c, o, f, 1);
        else if (!ONE_HALF)
            send_part(c, o, f, 0);
        named_sync(WARP_PAIR + c.warp, 2 * WARP_THREADS);
        ACR_TRACE_POINT(0, "parts exchanged");
        if (c.index != 0)
            add_part(c, packed[0], o, f, 1);
        else if (!ONE_HALF)
            add_part(c, packed[0], o, f, 0);
        else
            return;
    }
#pragma unroll
    for (int out = 0; out < OUT_ROWS; out++)
        store_rows(c, packed[out], f, out);
    ACR_TRACE_POINT(0, "stored");
}

/* Both halves of a word at once: an exponent of all ones plus its lowest bit carries into the sign's place; no other
 * does. The lower half carries no further, since its sign is masked out. */
DEV int all_finite(const uint32_t (&packed)[DIM / 8], const row_results &f)
{
    const uint32_t exponents = is_bf16(f) ? 0x7f807f80 : 0x7c007c00, least = is_bf16(f) ? 0x00800080 : 0x04000400;
    uint32_t carried = 0;
#pragma unroll
    for (int i = 0; i < DIM / 8; i++)
        carried |= (packed[i] & exponents) + least;
    return (carried & 0x80008000) == 0;
}

/* Whether a value that the warp has stored is not finite: it may come from a key that its row does not see. */
DEV int spoils_a_row(const uint32_t (&packed)[OUT_ROWS][DIM / 8], const row_results &f)
{
    int finite = 1;
#pragma unroll
    for (int out = 0; out < OUT_ROWS; out++)
        finite &= all_finite(packed[out], f);
    return __any_sync(~0u, !finite);
}

/* What few callers want or few inputs need of a stored row. again: `packed` may be of a second pass, of which the row
 * took nothing. */
DEV void finish_row(const fwd_args &a, const tile &t, const consumer &c, const row_results &f,
                    const uint32_t (&packed)[DIM / 8], const int out, int again)
{
    if (a.lse != nullptr && f.present[out] && c.lane % 4 == 0)
        find_lse(a, t.rows, t.batch, t.head)[f.row[out]] =
            E4M3 ? log_sum_exp(f.max[out], f.total[out] * unshifted(), scales_of(a, t).scale)
                 : row_lse(a, t.head, f.max[out], f.total[out] * unshifted());
    /* Asked before anything is computed for the fix-up: each instruction that runs once comes from afar. */
    if (!hides_keys(a, t.entry))
        return;
    const stored_row stored = {
        t.batch, t.head,       f.present[out] ? f.row[out] : a.q_len,      0,
        0,       c.scale_log2, offset_of<SHIFT>(f.max[out], c.scale_log2), factor_of(c, f.max[out], f.total[out], f),
    };
    fix_hidden_nan<ELEMENT, OUT_ELEMENT>(a, t.entry, stored, f.total[out], !again && all_finite(packed, f), c.lane);
}

#endif
