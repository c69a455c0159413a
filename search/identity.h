/* What a compiled candidate is: an ELF object looked at without running any of it.
 *
 * Identity is a digest of machine code and constants, without names: sections of code and read-only data, in an order
 * that depends on their content alone, and the launch. A candidate that renames, reorders declarations or reformats has
 * the identity of the original. */
#ifndef SEARCH_IDENTITY_H
#define SEARCH_IDENTITY_H

#include <stdint.h>

#include "internal.h"

typedef struct object_facts {
    int64_t code_bytes;
    char digest[33];   /* hexadecimal */
    char refusal[256]; /* "" or why no candidate may look like this: undefined symbols, writable data, code that runs at
                          load time */
} object_facts;

/* Looks at a file: a shared object of a CPU kernel, or a cubin. extra is hashed too (the launch, as text).
 * Errors: ACR_IO; ACR_FORMAT when it is no ELF object of the
 * kind. */
acr_status object_look(object_facts *out, const char *path, acr__backend_id backend, const char *extra);

/* Looks through a disassembly (objdump -d --no-show-raw-insn) for instructions that no kernel needs: system calls,
 * interrupts, ports, clocks, thread-local storage. "" or the first, with its address, goes to refusal. Errors:
 * ACR_IO. */
acr_status disassembly_look(char refusal[256], const char *path);

/* Looks through the PTX that a GPU's compiler made, in which literals and pasted words have become instructions:
 * clocks, waits, calls out of it. Errors: ACR_IO. */
acr_status ptx_look(char refusal[256], const char *path);

#endif
