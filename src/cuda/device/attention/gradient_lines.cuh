/* Lines of gradients, and their NaN fix-up. A line is a key, whose partners are the rows that see it, of all query
 * heads of its group; or a row, whose partners are the keys that it sees. A line has two rows of the inputs, x and y:
 * of K and V, or of Q and dO. Functions take KEYS where lines are keys.
 *
 * An includer defines what gradients.cuh wants. */
#ifndef ACR_DEVICE_ATTENTION_GRADIENT_LINES_CUH
#define ACR_DEVICE_ATTENTION_GRADIENT_LINES_CUH

#include "cuda/device/attention/gradients.cuh"
#include "cuda/device/attention/kv_loader.cuh"
#include "cuda/device/attention/scores.cuh"

enum {
    LINE_TYPE = BF16 ? ACR_BF16 : ACR_F16,
    LINE_ELEM_BYTES = 2,
    LANE_DIMS = DIM / 32 /* of a line that a warp computes again */
};

/* A head of a batch entry, of the lines. */
typedef struct line_head {
    sequence rows;
    visible_entry entry;
    int batch, head; /* batch: of a packed batch, whose batch strides are 0, the sequence */
} line_head;

/* ---- Where things are ---- */

/* Where the statistics of rows are: stored by a kernel before this one, those of all heads and entries; or nowhere, and
 * found again from O and dO. */
typedef struct stored_stats {
    float *of_all;
} stored_stats;
typedef struct unstored_stats {
} unstored_stats;

/* The statistics of an entry's rows of one head: those of row i are at stats_index(i), then Q_TILE further. stats:
 * of all heads and entries. */
DEV float *head_stats(const fwd_args &a, float *stats, int entry, int head)
{
    const int64_t tile = (int64_t)head * bwd_first_tile(&a, a.batch, Q_TILE) + bwd_first_tile(&a, entry, Q_TILE);
    return stats + tile * (2 * Q_TILE);
}

DEV int stats_index(int row)
{
    return row / Q_TILE * (2 * Q_TILE) + row % Q_TILE;
}

/* The partners of one line: consecutive ones. */
template <bool KEYS> DEV key_range partners_of(const visible_entry &e, int line)
{
    if constexpr (KEYS) {
        const visible_rows rows = visible_to_keys(e, line, 1);
        return {rows.first, rows.end};
    }
    return {visible_first(e, line), visible_end(e, line)};
}

/* The x or y of lines of an entry. head: theirs. */
template <bool KEYS> DEV chunk_matrix line_matrix(const bwd_args &args, const line_head &of, int head, bool is_y)
{
    const fwd_args &a = args.fwd;
    const int first = KEYS ? of.rows.kv_begin : of.rows.q_begin;
    const void *const x = KEYS ? a.k : a.q, *const y = KEYS ? a.v : args.d_o;
    const fwd_strides &x_stride = KEYS ? a.k_stride : a.q_stride, &y_stride = KEYS ? a.v_stride : args.d_o_stride;
    return is_y ? head_matrix_of(y, y_stride, of.batch, head, first, a.v_dim, LINE_ELEM_BYTES)
                : head_matrix_of(x, x_stride, of.batch, head, first, a.qk_dim, LINE_ELEM_BYTES);
}

/* Where a line of a gradient begins, in elements. */
template <bool KEYS> DEV int64_t gradient_index(const line_head &of, const fwd_strides &stride, int line)
{
    return of.batch * stride.batch + of.head * stride.head +
           ((KEYS ? of.rows.kv_begin : of.rows.q_begin) + line) * stride.row;
}

/* ---- ALiBi ---- */

/* What is taken off a score for each key between a row and a key; of no ALiBi 0. */
DEV float slope_of(const fwd_args &a, int head)
{
    return has_term(FWD_TERM_ALIBI) && a.slopes != nullptr ? a.slopes[head] * LOG2_E : 0.0f;
}

/* Where a line stands among its partners. */
template <bool KEYS> DEV int position_of(const visible_entry &e, int line)
{
    return KEYS ? line - visible_diagonal(e) : line + visible_diagonal(e);
}

/* ---- The NaN fix-up ----
 *
 * A pair that is hidden has P = dS = 0 in the products, but 0 * NaN is NaN: what is not finite in a partner reaches the
 * lines that it is hidden from. Such lines are found when they are stored, and computed again from global memory, by a
 * warp each: right, and slow, and only for such inputs. */

/* NaN where a value of row h of accumulators is not finite. */
template <int ELEMS> DEV float probe(const float (&d)[ELEMS], int h)
{
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < ELEMS / 4; i++)
        sum = fmaf(d[4 * i + 2 * h], 0.0f, fmaf(d[4 * i + 2 * h + 1], 0.0f, sum));
    return sum;
}

/* Eight lines, a quad of lanes each: a bit for each line of which a lane says that it is spoilt. */
DEV unsigned find_spoilt(bool is_spoilt)
{
    const unsigned lanes = __ballot_sync(~0u, is_spoilt);
    unsigned lines = 0;
#pragma unroll
    for (int quad = 0; quad < 8; quad++)
        lines |= (lanes >> 4 * quad & 15) != 0 ? 1u << quad : 0;
    return lines;
}

/* The lane's dims of a row of a matrix; 0 beyond its columns. */
DEV void load_dims(float (&x)[LANE_DIMS], const chunk_matrix &m, int row, int lane)
{
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) {
        const int column = lane + 32 * i;
        x[i] = column < m.chunks * CHUNK_ELEMS ? load_element<LINE_TYPE>(m.base + row * m.row_bytes, column) : 0.0f;
    }
}

/* The same sum in all lanes of the warp. */
DEV float dot_dims(const float (&x)[LANE_DIMS], const float (&y)[LANE_DIMS])
{
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++)
        sum = fmaf(x[i], y[i], sum);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        sum += __shfl_xor_sync(~0u, sum, distance);
    return sum;
}

/* Columns [first, end) of a line. */
DEV void store_dims(const bwd_args &args, void *gradient, int64_t at, int first, int end, const float (&x)[LANE_DIMS],
                    float factor, int lane)
{
#pragma unroll
    for (int i = 0; i < LANE_DIMS; i++) {
        const int column = lane + 32 * i;
        if (column < first || column >= end)
            continue;
        if (args.grad_f32)
            store_element<ACR_F32>(gradient, at + column, x[i] * factor);
        else
            store_element<LINE_TYPE>(gradient, at + column, x[i] * factor);
    }
}

/* A row's LSE in powers of two, and its D. stats says where they are; the whole warp comes together. */
DEV float2 row_stats(const bwd_args &args, const line_head &of, const stored_stats &stats, int head, int row, int)
{
    const float *const at = head_stats(args.fwd, stats.of_all, of.batch, head) + stats_index(row);
    return {at[0], at[Q_TILE]};
}

DEV float2 row_stats(const bwd_args &args, const line_head &of, const unstored_stats &, int head, int row, int lane)
{
    const fwd_args &a = args.fwd;
    float o[LANE_DIMS], d_o[LANE_DIMS];
    load_dims(o, head_matrix_of(a.o, a.o_stride, of.batch, head, of.rows.q_begin, a.v_dim, LINE_ELEM_BYTES), row, lane);
    load_dims(d_o, line_matrix<false>(args, of, head, true), row, lane);
    return {stats_lse(find_lse(a, of.rows, of.batch, head)[row]), dot_dims(o, d_o)};
}

/* taken: by ALiBi. */
DEV float weight_exponent(float score, float factor, float bias, float taken, float lse)
{
    return has_term(FWD_TERM_BIAS) ? added_exponent(score, factor, bias - taken, lse)
                                   : fmaf(score, factor, -(lse + taken));
}

/* Computes a line's dK and dV, or dQ, again, by a warp, and stores columns [first, end) of those. */
template <bool KEYS, typename STATS>
DEV void fix_line(const bwd_args &args, const line_head &of, const STATS &stats, int line, int first, int end, int lane)
{
    const fwd_args &a = args.fwd;
    const key_range seen = partners_of<KEYS>(of.entry, line);
    const int first_head = KEYS ? of.head * a.group : of.head / a.group, heads = KEYS ? a.group : 1;
    float x[LANE_DIMS], y[LANE_DIMS], dx[LANE_DIMS] = {}, dy[LANE_DIMS] = {};
    load_dims(x, line_matrix<KEYS>(args, of, of.head, false), line, lane);
    load_dims(y, line_matrix<KEYS>(args, of, of.head, true), line, lane);
#pragma unroll 1
    for (int head = first_head; head < first_head + heads; head++) {
        const float slope = slope_of(a, KEYS ? head : of.head);
        const chunk_matrix of_x = line_matrix<!KEYS>(args, of, head, false),
                           of_y = line_matrix<!KEYS>(args, of, head, true);
#pragma unroll 1
        for (int partner = seen.first; partner < seen.end; partner++) {
            bool is_lost = true; /* all sums are NaN, and will be */
#pragma unroll
            for (int i = 0; i < LANE_DIMS; i++)
                is_lost = is_lost && isnan(dx[i]) && (!KEYS || isnan(dy[i]));
            if (__all_sync(~0u, is_lost))
                break;
            float bias = 0.0f;
            if (has_term(FWD_TERM_BIAS) && a.bias != nullptr) {
                const row_terms t = find_row_terms(a, of.entry, of.batch, KEYS ? head : of.head, KEYS ? partner : line);
                bias = find_bias(a, t, KEYS ? line : partner);
                if (bias == -CUDART_INF_F)
                    continue;
            }
            const float2 row = row_stats(args, of, stats, KEYS ? head : of.head, KEYS ? partner : line, lane);
            float other_x[LANE_DIMS], other_y[LANE_DIMS];
            load_dims(other_x, of_x, partner, lane);
            load_dims(other_y, of_y, partner, lane);
            const float score = dot_dims(x, other_x), dp = dot_dims(y, other_y);
            const float taken = slope * fabsf((float)(position_of<KEYS>(of.entry, line) - partner));
            float p, flat = 1.0f;
            if (has_term(FWD_TERM_CAP) && a.softcap > 0.0f) {
                const float t = tanh_fast(score * a.softcap_in);
                flat = fmaf(-t, t, 1.0f);
                p = exp2_fast(weight_exponent(t, a.softcap_out, bias, taken, row.x));
            } else
                p = exp2_fast(weight_exponent(score, a.scale_log2, bias, taken, row.x));
            const float ds = p * flat * (dp - row.y);
#pragma unroll
            for (int i = 0; i < LANE_DIMS; i++) {
                dx[i] = fmaf(ds, other_x[i], dx[i]);
                dy[i] = fmaf(p, other_y[i], dy[i]);
            }
        }
    }
    if (KEYS) {
        store_dims(args, args.dk, gradient_index<KEYS>(of, args.dk_stride, line), first, min(end, a.qk_dim), dx,
                   a.scale, lane);
        store_dims(args, args.dv, gradient_index<KEYS>(of, args.dv_stride, line), first, min(end, a.v_dim), dy, 1.0f,
                   lane);
    } else
        store_dims(args, args.dq, gradient_index<KEYS>(of, args.dq_stride, line), first, min(end, a.qk_dim), dx,
                   a.scale, lane);
}

/* Fixes columns [first, end) of the lines that the warp has just stored and that `spoilt` names: bit i is the line
 * first_line + i. Where the rule hides nothing, what is not finite is so by right. The whole warp comes together. */
template <bool KEYS, typename STATS>
DEV void fix_lines(const bwd_args &args, const line_head &of, const STATS &stats, unsigned spoilt, int first_line,
                   int first, int end, int lane)
{
    if (!hides_keys(args.fwd, of.entry))
        return;
    __syncwarp(); /* the values are other lanes' */
#pragma unroll 1
    for (int line = first_line; spoilt != 0; line++, spoilt >>= 1)
        if (spoilt & 1)
            fix_line<KEYS>(args, of, stats, line, first, end, lane);
}

#endif
