/* ELF files as bytes: opened, bounds checked, and laid out as a loader would lay them out, without a loader. Nothing
 * of a file runs here: whatever it would have a loader do (resolvers, constructors, other libraries) does not happen.
 */
#ifndef SEARCH_ELF_OBJECT_H
#define SEARCH_ELF_OBJECT_H

#include <elf.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "acromion.h"

/* A file in memory, with its tables. All of it is inside the file: elf_open has looked. */
typedef struct elf_object {
    const unsigned char *bytes;
    size_t size;
    const Elf64_Ehdr *header;
    const Elf64_Shdr *sections;
    size_t count;
    const Elf64_Phdr *segments;
    size_t segment_count;
    const char *names;
    size_t names_bytes;
} elf_object;

/* False when the bytes are no whole 64-bit little-endian ELF file. They must be aligned to 8 and outlive the object. */
bool elf_open(elf_object *out, const void *bytes, size_t size);

const char *elf_section_name(const elf_object *o, const Elf64_Shdr *s);

/* The symbols of a table, NULL for one that is malformed; a symbol's name, NULL for none. */
const Elf64_Sym *elf_symbols(const elf_object *o, const Elf64_Shdr *table, size_t *count);
const char *elf_symbol_name(const elf_object *o, const Elf64_Shdr *table, const Elf64_Sym *s);

/* The entries of a table of relocations with addends, NULL for one that is malformed. */
const Elf64_Rela *elf_relocations(const elf_object *o, const Elf64_Shdr *table, size_t *count);

/* Relocations that only add the load address. */
bool elf_is_relative(const elf_object *o, const Elf64_Rela *r);

/* The loadable part of a shared object, laid out from address 0 on. */
typedef struct elf_code {
    unsigned char *bytes;
    size_t size;
    size_t first_code, end_code; /* what is to be executable */
    size_t entry;
    size_t address_count;
    size_t *addresses; /* places of 8 bytes to which the load address is to be added */
} elf_code;

/* Reads the file and finds the function `symbol` in it (NULL: the caller sets the entry). Free with elf_code_free.
 * Errors: ACR_IO; ACR_FORMAT for what is no shared object, has relocations of other kinds, or does not define the
 * symbol. */
acr_status elf_code_read(elf_code *out, const char *path, const char *symbol);
void elf_code_free(elf_code *code);

/* Writes it to `to` as it must be in order to run at the address `at`. */
void elf_code_place(unsigned char *to, const elf_code *code, uintptr_t at);

#endif
