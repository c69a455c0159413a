/* The program acromion: finds the subcommand and runs it. */
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/exit_code.h"
#include "build_info.h"
#include "commands/commands.h"
#include "search/commands/commands.h"
#include "report/report_data.h"
#include "search/gates.h"
#include "search/summary.h"
#include "search/variant.h"

typedef struct command {
    const char *name;
    const char *summary;               /* one line for the list of commands */
    int (*run)(int argc, char **argv); /* argv[0] is the command's name; returns an exit code */
} command;

static const command commands[] = {
    {"run", "attention on .npy files", cmd_run},
    {"info", "devices, instruction sets, kernels and their limits", cmd_info},
    {"why", "for a problem: which kernel is chosen, and why each other is not", cmd_why},
    {"check", "the correctness gate: every kernel against a float64 oracle", cmd_check},
    {"bench", "time the kernels, gates first; distance from the physical floor", cmd_bench},
    {"roofline", "the physical floor of a problem on a GPU you need not have", cmd_roofline},
    {"wisdom", "show, verify, merge or measure files of measured choices", cmd_wisdom},
    {"evolve", "search for a faster kernel, with gates, a control and a store of every trial", cmd_evolve},
    {"judge", "one judgement of a search as a command: what a worker of evolve --launcher runs", cmd_judge},
    {"trials", "what a search tried: list, show, diff, export", cmd_trials},
    {"promote", "put a confirmed trial into kernels.def and the wisdom", cmd_promote},
    {"profile", "hardware counters of one launch, what binds it; cycles of its steps", cmd_profile},
    {"variant", "compile listed kernels with other parameters, for bench and check", cmd_variant},
    {"report", "results as one HTML page, and as the tables of the README", cmd_report},
};
enum {
    COMMAND_COUNT = sizeof commands / sizeof commands[0]
};

static void print_help(FILE *out)
{
    fputs("acromion: fused scaled-dot-product attention, and the tools that check and measure it\n"
          "\n"
          "usage: acromion COMMAND [options] [PROBLEM...]\n"
          "\n",
          out);
    for (size_t i = 0; i < COMMAND_COUNT; ++i) {
        fprintf(out, "  %-10s %s\n", commands[i].name, commands[i].summary);
    }
    fputs("\n"
          "`acromion help COMMAND` explains a command. A problem is written like b2:h8:s512:d64 (batch, heads, "
          "length,\n"
          "head dim; fp16 without a mask) or bf16:b8:h32/8:s1/8192:d128:causal:kvlens; without one, commands take "
          "b2:h8:s512:d64.\n"
          "\n"
          "examples:\n"
          "  acromion check                          every kernel of this machine against the oracle\n"
          "  acromion bench b2:h8:s512:d64:causal    time the kernels that can run it\n"
          "  acromion roofline --gpu l4 --target 5us what no kernel can beat\n",
          out);
}

static int print_version(void)
{
    printf("acromion %s (%s%s)\n", acr_version(), BUILD_GIT_SHA, BUILD_GIT_DIRTY ? ", modified" : "");
    return EXIT_DONE;
}

/* What was printed must have arrived: a full disk or a closed pipe is no success. */
static int finish(int exit_code)
{
    const bool failed = ferror(stdout) != 0;
    errno = 0;
    if (fclose(stdout) == 0 && !failed) {
        return exit_code;
    }
    fprintf(stderr, "acromion: standard output: %s\n", errno ? strerror(errno) : "not everything could be written");
    return exit_code == EXIT_DONE ? EXIT_FILE : exit_code;
}

static const command *find_command(const char *name)
{
    for (size_t i = 0; i < COMMAND_COUNT; ++i) {
        if (strcmp(name, commands[i].name) == 0) {
            return &commands[i];
        }
    }
    fprintf(stderr, "acromion: no command '%s'; `acromion --help` lists them\n", name);
    return NULL;
}

/* `help COMMAND` is `COMMAND --help`. */
static int help(int argc, char **argv)
{
    static char option[] = "--help";
    if (argc < 3) {
        print_help(stdout);
        return EXIT_DONE;
    }
    const command *asked = find_command(argv[2]);
    char *arguments[] = {argv[2], option, NULL};
    return asked ? asked->run(2, arguments) : EXIT_USAGE;
}

static bool is_one_of(const char *name, const char *word, const char *letter, const char *option)
{
    return strcmp(name, word) == 0 || strcmp(name, letter) == 0 || strcmp(name, option) == 0;
}

int main(int argc, char **argv)
{
    int exit_code = EXIT_DONE;
    if (gates_child(argc, argv, &exit_code)) {
        return exit_code;
    }
    variants_made_by(&search_variant_maker);
    report_use_summaries(summary_of_file);
    if (argc < 2) {
        print_help(stderr);
        return EXIT_USAGE;
    }
    if (is_one_of(argv[1], "help", "-h", "--help")) {
        return finish(help(argc, argv));
    }
    if (is_one_of(argv[1], "--version", "-V", "--version")) {
        return finish(print_version());
    }
    const command *asked = find_command(argv[1]);
    return asked ? finish(asked->run(argc - 1, argv + 1)) : EXIT_USAGE;
}
