/* The commands of the workbench: each is one file cmd_<name>.c and one line of the table in cli/main.c. argv[0] is the
 * command's name; what is returned is an exit code. */
#ifndef WORKBENCH_COMMANDS_H
#define WORKBENCH_COMMANDS_H

#include "bench/peer_interface.h"

int cmd_run(int argc, char **argv);
int cmd_info(int argc, char **argv);
int cmd_why(int argc, char **argv);
int cmd_check(int argc, char **argv);
int cmd_bench(int argc, char **argv);
int cmd_roofline(int argc, char **argv);
int cmd_wisdom(int argc, char **argv);
int cmd_profile(int argc, char **argv);
int cmd_report(int argc, char **argv);

/* cmd_bench with peers that another language provides; NULL = none. */
int bench_with_peers(int argc, char **argv, const peer_provider *torch);

#endif
