/* The commands of the search, see workbench/commands/commands.h. */
#ifndef SEARCH_COMMANDS_H
#define SEARCH_COMMANDS_H

int cmd_evolve(int argc, char **argv);
int cmd_judge(int argc, char **argv);
int cmd_trials(int argc, char **argv);
int cmd_promote(int argc, char **argv);
int cmd_variant(int argc, char **argv);

#endif
