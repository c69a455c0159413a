/* Handing over to Python, see python_exec.h. */
#include "python_exec.h"

#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/child.h"
#include "base/exit_code.h"

/* The first of the places, relative to the folder, where the file exists: folder/place. */
static bool find_place(char out[PATH_MAX], const char *folder, const char *const *places, const char *file)
{
    for (; *places; ++places) {
        char path[PATH_MAX];
        int length = snprintf(path, sizeof path, "%s/%s/%s", folder, *places, file);
        if (length < PATH_MAX && access(path, R_OK) == 0) {
            path[length - (int)strlen(file) - 1] = '\0';
            memcpy(out, path, strlen(path) + 1);
            return true;
        }
    }
    return false;
}

/* Puts a folder before those of PYTHONPATH. */
static bool prepend_python_path(const char *folder)
{
    const char *old = getenv("PYTHONPATH");
    if (!old || !*old) {
        return setenv("PYTHONPATH", folder, 1) == 0;
    }
    size_t size = strlen(folder) + strlen(old) + 2;
    char *joined = malloc(size);
    if (!joined) {
        return false;
    }
    snprintf(joined, size, "%s:%s", folder, old);
    bool done = setenv("PYTHONPATH", joined, 1) == 0;
    free(joined);
    return done;
}

static bool set_environment(const char *python_path)
{
    static const char *const python_places[] = {"python", "../../python", "../lib/acromion/python", NULL};
    static const char *const library_places[] = {".", "../lib/acromion", NULL};
    static const char module[] = "acromion/bench.py", library[] = "libacromion_bench.so";
    char folder[PATH_MAX], found[PATH_MAX], library_path[PATH_MAX + sizeof library];
    if (!child_own_folder(folder)) {
        fprintf(stderr, "acromion: --peers: where this program lies is unknown: %s\n", strerror(errno));
        return false;
    }
    if (!python_path) {
        if (!find_place(found, folder, python_places, module)) {
            fprintf(stderr,
                    "acromion: --peers: %s is not beside the program, nor where it is installed; "
                    "--python-path names the folder that holds it\n",
                    module);
            return false;
        }
        python_path = found;
    }
    if (!prepend_python_path(python_path)) {
        return false;
    }
    if (!getenv("ACROMION_BENCH_LIBRARY") && find_place(found, folder, library_places, library)) {
        snprintf(library_path, sizeof library_path, "%s/%s", found, library);
        return setenv("ACROMION_BENCH_LIBRARY", library_path, 1) == 0;
    }
    return true; /* without a library the module says where it looked */
}

/* Runs `python3 OPTION WHAT argv[1]...` in this process's place; returns only if that is not possible. */
static int exec_python(const char *option, const char *what, int argc, char **argv)
{
    const char *chosen = getenv("PYTHON");
    const char *python = chosen && *chosen ? chosen : "python3";
    enum {
        BEFORE = 3
    };
    char **args = calloc((size_t)argc + BEFORE, sizeof *args); /* argv[0] gives its place to the terminating NULL */
    char *first[BEFORE] = {strdup(python), strdup(option), strdup(what)};
    if (args && first[0] && first[1] && first[2]) {
        memcpy(args, first, sizeof first);
        for (int i = 1; i < argc; ++i) {
            args[BEFORE + i - 1] = argv[i];
        }
        execvp(python, args);
        fprintf(stderr, "acromion bench: cannot run %s: %s\n", python, strerror(errno));
    } else {
        fprintf(stderr, "acromion bench: out of memory\n");
    }
    for (int i = 0; i < BEFORE; ++i) {
        free(first[i]);
    }
    free(args);
    return EXIT_CANNOT_RUN;
}

int python_exec_bench(int argc, char **argv, const char *python_path)
{
    return set_environment(python_path) ? exec_python("-m", "acromion.bench", argc, argv) : EXIT_CANNOT_RUN;
}

int python_exec_gpus(int argc, char **argv, const char *python_path)
{
    static const char name[] = "acromion";
    static const char run[] =
        "import importlib.util, runpy, sys\n"
        "if not importlib.util.find_spec('acromion'):\n"
        "    print('acromion bench: --gpus:', sys.executable, 'has no package acromion: install '\n"
        "          'the wheel, or name its folder by --python-path', file=sys.stderr)\n"
        "    sys.exit(4)\n"
        "runpy.run_module('acromion.bench_gpus', run_name='__main__', alter_sys=True)\n";
    char folder[PATH_MAX], program[PATH_MAX + sizeof name];
    if (child_own_folder(folder)) {
        snprintf(program, sizeof program, "%s/%s", folder, name);
        setenv("ACROMION_PROGRAM", program, 1);
    }
    if (python_path && !prepend_python_path(python_path)) {
        return EXIT_CANNOT_RUN;
    }
    return exec_python("-c", run, argc, argv);
}
