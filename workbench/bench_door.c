/* What libacromion_bench.so exports, see bench_door.h. */
#include "bench_door.h"

#include "contest.h"

__attribute__((visibility("default"))) int acromion_bench(int argc, char **argv, const peer_provider *provider)
{
    return bench_with_peers(argc, argv, provider);
}
