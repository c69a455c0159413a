/* Handing a command over to Python, which comes back through peer_interface.h. */
#ifndef WORKBENCH_PYTHON_EXEC_H
#define WORKBENCH_PYTHON_EXEC_H

/* Runs `python3 -m acromion.bench` ($PYTHON, where it is set, for python3) in this process's place, with the arguments
 * argv[1..argc). python_path is the folder that holds the package acromion; NULL = beside the program, in its source
 * tree, or where it is installed. Returns an exit code, after printing why, only if that is not possible. */
int python_exec_bench(int argc, char **argv, const char *python_path);

/* The same of `python3 -m acromion.bench_gpus`, from the package that Python has installed, with its compiled half;
 * python_path comes before it where it is given. */
int python_exec_gpus(int argc, char **argv, const char *python_path);

#endif
