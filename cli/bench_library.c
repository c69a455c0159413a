/* What libacromion_bench.so exports, see peer_interface.h. */
#include "bench/peer_interface.h"

#include <stdio.h>

#include "base/exit_code.h"
#include "commands/commands.h"
#include "search/variant.h"

__attribute__((visibility("default"))) int acromion_bench(int argc, char **argv, const peer_provider *provider)
{
    if (provider->provider_bytes != (int32_t)sizeof *provider ||
        provider->problem_bytes != (int32_t)sizeof(peer_problem)) {
        fprintf(stderr, "acromion: --peers: the Python module and libacromion_bench.so are of different versions\n");
        return EXIT_CANNOT_RUN;
    }
    variants_made_by(&search_variant_maker);
    return bench_with_peers(argc, argv, provider);
}
