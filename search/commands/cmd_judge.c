/* acromion judge: what a worker of `evolve --launcher` runs. The work is in search/worker.c. */
#include <stdio.h>

#include "base/exit_code.h"
#include "base/options.h"
#include "commands.h"
#include "search/worker.h"

static const option_spec options[OPTIONS_MAX] = {{0}};

static const command_spec spec = {
    .usage = "judge",
    .examples = "  acromion evolve --launcher 'srun -n1 --gpus=1' --workers 8 b2:h8:s512:d64\n",
    .about = "Does one judgement of `acromion evolve --launcher`: takes a JSON job with all its files on standard\n"
             "input and writes a JSON result of one line to standard output. The candidate runs in a process of its\n"
             "own, as in any search. Started by a launcher, not by hand.\n",
    .options = options,
    .common = 0,
};

static bool take_option(void *arg, int id, const char *value)
{
    (void)arg;
    (void)id;
    (void)value;
    return false;
}

int cmd_judge(int argc, char **argv)
{
    common_options common;
    int exit_code = EXIT_DONE;
    if (options_parse(&spec, argc, argv, &common, take_option, NULL, &exit_code) < 0) {
        return exit_code;
    }
    return worker_serve();
}
