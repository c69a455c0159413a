/* How another language takes part in `acromion bench`: libacromion_bench.so exports one function. It
 * is the whole command; the caller only provides the peers, the library whose attention ours is compared with. Both
 * share the process and the device's primary context. Known user: python/acromion/bench.py, which repeats these
 * structures.
 *
 * Callbacks return 0, or -1 after writing the reason. `text` has PEER_TEXT_BYTES bytes and is "" before the call. */
#ifndef WORKBENCH_PEER_INTERFACE_H
#define WORKBENCH_PEER_INTERFACE_H

#include <stdint.h>

enum {
    PEER_TEXT_BYTES = 512,
    PEER_OURS = -1, /* as the peer's number: our own execution */
    PEERS_MAX = 16
};

enum {
    PEER_MASK_NONE = 0,
    PEER_MASK_TOP_LEFT = 1,    /* query i sees keys 0..i; also where both causal masks are the same */
    PEER_MASK_BOTTOM_RIGHT = 2 /* query i sees keys 0..i + kv_len - q_len */
};

/* What is timed. The output is [batch, q_heads, q_len, v_dim], or dq, dk and dv, packed, one behind the other. */
enum {
    PEER_FORWARD = 0,
    PEER_BACKWARD = 1, /* gradients alone; the forward pass is run beforehand */
    PEER_STEP = 2      /* the forward pass with its log-sum-exp, and the gradients behind it */
};

typedef struct peer_problem {
    int64_t batch, q_heads, kv_heads, q_len, kv_len, qk_dim, v_dim;
    int32_t device; /* ordinal */
    int32_t dtype;  /* acr_dtype: 1 float32, 2 float16, 3 bfloat16, 4 e4m3 with scales of 1 */
    int32_t mask;   /* PEER_MASK_* */
    int32_t bshd;   /* device tensors are [batch, length, heads, dim] in memory, else [batch, heads, length, dim] */
    int32_t sets;   /* copies of the inputs on the device, more than 1 in rotating mode */
    int32_t pass;   /* PEER_FORWARD, PEER_BACKWARD or PEER_STEP */
    double scale;   /* of the scores */
    const void *q, *k, *v; /* on the host, packed [batch, heads, length, dim] */
    /* Features, in the words of acromion.h; 0 and NULL are none. A provider refuses what it cannot do. */
    int64_t window_left, window_right, chunk;
    double softcap;
    const float *sinks, *slopes; /* on the host, [q_heads] */
    const void *bias;            /* on the host, by the strides; a key's is 1 */
    int64_t bias_batch, bias_head, bias_row;
    int64_t bias_elements; /* that lie there */
    int32_t bias_dtype;    /* acr_dtype: 1 float32, 2 float16, 3 bfloat16, 5 boolean */
    int32_t out_dtype;     /* of o, as dtype */
    const void *d_o;       /* on the host, packed as o, of a pass with gradients */
} peer_problem;

/* Whether a problem has any of the features. */
static inline int peer_has_features(const peer_problem *p)
{
    return p->window_left || p->window_right || p->chunk || p->softcap > 0 || p->sinks || p->slopes || p->bias;
}

/* What one call mode's sample calls, as often as asked: enqueue(arg, stream) is one call of ours. */
typedef int32_t peer_enqueue(void *arg, void *stream);

typedef struct peer_provider {
    int32_t provider_bytes, problem_bytes; /* of these two structures, as the caller knows them */
    int32_t count;
    const char *const *names; /* of the peers: "torch-flash" */
    const char *version;      /* of their library */
    /* Makes the inputs of a problem; the peers keep them until end. */
    int32_t (*begin)(const peer_problem *problem, char *text);
    /* Captures `launches` calls back to back, the i-th over the inputs i mod sets, into *graph, a CUgraph that stays
     * the provider's and valid until the peer's next capture or end. The output is NaN until the graph runs. On success
     * too, text may say something about the peer. *graph stays NULL where the peer's calls cannot be captured; then
     * stretch times them. */
    int32_t (*capture)(int32_t peer, int32_t launches, void **graph, char *text);
    /* Makes `calls` ordinary calls, waits for the last, and writes the seconds a call. For PEER_OURS the call is
     * enqueue(arg, NULL). */
    int32_t (*call)(int32_t peer, int32_t calls, peer_enqueue *enqueue, void *arg, double *seconds, char *text);
    /* Copies the peer's last output to the host, packed. */
    int32_t (*output)(int32_t peer, void *packed, int64_t bytes, char *text);
    /* Frees what belongs to the problem. */
    void (*end)(void);
    /* For providers in C, which leave capture and call NULL: enqueues one call over the inputs `set` on a stream.
     * Before the first, the output is NaN. */
    int32_t (*enqueue)(int32_t peer, int32_t set, void *stream, char *text);
    /* Twice makes one call alone and waits for its end, since the first after a pause is late; then one and `launches`
     * more, waits for the last one's end, and writes what these take longer than the second, a launch, in seconds. The
     * way from the host to the device is no part of it as long as a call takes the device longer than the host. NULL of
     * a provider all of whose calls are captured. */
    int32_t (*stretch)(int32_t peer, int32_t launches, double *seconds, char *text);
} peer_provider;

/* `acromion bench` with the arguments argv[1..argc), argv[0] being ignored. Returns its exit code. */
int acromion_bench(int argc, char **argv, const peer_provider *provider);

#endif
