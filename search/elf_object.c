/* ELF files as bytes, see elf_object.h. */
#include "elf_object.h"

#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "internal.h"

enum {
    SECTIONS_MAX = 4096,
    SEGMENTS_MAX = 64
};
static const uint64_t CODE_BYTES_MAX = (uint64_t)64 << 20;

static bool inside(const elf_object *o, uint64_t offset, uint64_t bytes)
{
    return offset <= o->size && bytes <= o->size - offset;
}

/* A table of entries of one size, within the file. */
static const void *table_at(const elf_object *o, uint64_t offset, uint64_t count, size_t entry_bytes)
{
    const bool whole = offset % _Alignof(uint64_t) == 0 && inside(o, offset, count * entry_bytes);
    return whole ? o->bytes + offset : NULL;
}

static bool open_names(elf_object *o)
{
    const Elf64_Shdr *names = &o->sections[o->header->e_shstrndx];
    if (!inside(o, names->sh_offset, names->sh_size) || names->sh_size == 0 ||
        o->bytes[names->sh_offset + names->sh_size - 1] != '\0') {
        return false;
    }
    o->names = (const char *)o->bytes + names->sh_offset;
    o->names_bytes = names->sh_size;
    return true;
}

bool elf_open(elf_object *out, const void *bytes, size_t size)
{
    elf_object o = {.bytes = bytes, .size = size, .header = bytes};
    const Elf64_Ehdr *h = o.header;
    if (!bytes || size < sizeof *h || memcmp(h->e_ident, ELFMAG, SELFMAG) != 0 || h->e_ident[EI_CLASS] != ELFCLASS64 ||
        h->e_ident[EI_DATA] != ELFDATA2LSB || h->e_shentsize != sizeof(Elf64_Shdr) || h->e_shnum > SECTIONS_MAX ||
        h->e_shstrndx >= h->e_shnum || (h->e_phnum > 0 && h->e_phentsize != sizeof(Elf64_Phdr)) ||
        h->e_phnum > SEGMENTS_MAX) {
        return false;
    }
    o.count = h->e_shnum;
    o.segment_count = h->e_phnum;
    o.sections = table_at(&o, h->e_shoff, o.count, sizeof *o.sections);
    o.segments = table_at(&o, h->e_phnum > 0 ? h->e_phoff : 0, o.segment_count, sizeof *o.segments);
    if (!o.sections || !o.segments || !open_names(&o)) {
        return false;
    }
    for (size_t i = 0; i < o.count; ++i) {
        const Elf64_Shdr *s = &o.sections[i];
        if (s->sh_name >= o.names_bytes || (s->sh_type != SHT_NOBITS && !inside(&o, s->sh_offset, s->sh_size))) {
            return false;
        }
    }
    *out = o;
    return true;
}

const char *elf_section_name(const elf_object *o, const Elf64_Shdr *s)
{
    return o->names + s->sh_name;
}

const Elf64_Sym *elf_symbols(const elf_object *o, const Elf64_Shdr *table, size_t *count)
{
    *count = table->sh_size / sizeof(Elf64_Sym);
    return table->sh_entsize == sizeof(Elf64_Sym) && table->sh_link < o->count
               ? table_at(o, table->sh_offset, *count, sizeof(Elf64_Sym))
               : NULL;
}

const char *elf_symbol_name(const elf_object *o, const Elf64_Shdr *table, const Elf64_Sym *s)
{
    const Elf64_Shdr *strings = &o->sections[table->sh_link];
    const char *text = (const char *)o->bytes + strings->sh_offset;
    const bool ended = strings->sh_type == SHT_STRTAB && strings->sh_size > 0 && text[strings->sh_size - 1] == '\0';
    return ended && s->st_name > 0 && s->st_name < strings->sh_size ? text + s->st_name : NULL;
}

const Elf64_Rela *elf_relocations(const elf_object *o, const Elf64_Shdr *table, size_t *count)
{
    *count = table->sh_size / sizeof(Elf64_Rela);
    return table->sh_entsize == sizeof(Elf64_Rela) ? table_at(o, table->sh_offset, *count, sizeof(Elf64_Rela)) : NULL;
}

bool elf_is_relative(const elf_object *o, const Elf64_Rela *r)
{
    const uint64_t type = ELF64_R_TYPE(r->r_info);
    return o->header->e_machine == EM_X86_64    ? type == R_X86_64_RELATIVE
           : o->header->e_machine == EM_AARCH64 ? type == R_AARCH64_RELATIVE
                                                : false;
}

/* ---- Laying out ---- */

static bool lay_out_segments(elf_code *code, const elf_object *o)
{
    code->first_code = SIZE_MAX;
    for (size_t i = 0; i < o->segment_count; ++i) {
        const Elf64_Phdr *p = &o->segments[i];
        if (p->p_type != PT_LOAD) {
            continue;
        }
        if (p->p_vaddr > code->size || p->p_memsz > code->size - p->p_vaddr || p->p_filesz > p->p_memsz ||
            !inside(o, p->p_offset, p->p_filesz)) {
            return false;
        }
        memcpy(code->bytes + p->p_vaddr, o->bytes + p->p_offset, p->p_filesz);
        if (p->p_flags & PF_X) {
            const size_t end = p->p_vaddr + p->p_memsz;
            code->first_code = p->p_vaddr < code->first_code ? p->p_vaddr : code->first_code;
            code->end_code = end > code->end_code ? end : code->end_code;
        }
    }
    return code->end_code > 0;
}

static uint64_t size_in_memory(const elf_object *o)
{
    uint64_t size = 0;
    for (size_t i = 0; i < o->segment_count; ++i) {
        const Elf64_Phdr *p = &o->segments[i];
        if (p->p_type == PT_LOAD && p->p_vaddr < CODE_BYTES_MAX && p->p_memsz < CODE_BYTES_MAX) {
            size = p->p_vaddr + p->p_memsz > size ? p->p_vaddr + p->p_memsz : size;
        }
    }
    return size;
}

/* Applies the addends; what remains to be added is the load address. */
static bool relocate(elf_code *code, const elf_object *o, const Elf64_Shdr *table)
{
    size_t count;
    const Elf64_Rela *entries = elf_relocations(o, table, &count);
    size_t *grown = entries ? realloc(code->addresses, (code->address_count + count + 1) * sizeof *grown) : NULL;
    if (!grown) {
        return false;
    }
    code->addresses = grown;
    for (size_t i = 0; i < count; ++i) {
        const Elf64_Rela *r = &entries[i];
        if (!elf_is_relative(o, r) || r->r_offset > code->size || code->size - r->r_offset < sizeof r->r_addend) {
            return false;
        }
        memcpy(code->bytes + r->r_offset, &r->r_addend, sizeof r->r_addend);
        code->addresses[code->address_count++] = r->r_offset;
    }
    return true;
}

static bool find_entry(elf_code *code, const elf_object *o, const char *symbol)
{
    for (size_t i = 0; i < o->count; ++i) {
        size_t count = 0;
        const Elf64_Shdr *table = &o->sections[i];
        const Elf64_Sym *symbols = table->sh_type == SHT_DYNSYM ? elf_symbols(o, table, &count) : NULL;
        for (size_t j = 1; symbols && j < count; ++j) {
            const char *name = elf_symbol_name(o, table, &symbols[j]);
            if (name && strcmp(name, symbol) == 0 && symbols[j].st_shndx != SHN_UNDEF &&
                symbols[j].st_value >= code->first_code && symbols[j].st_value < code->end_code) {
                code->entry = symbols[j].st_value;
                return true;
            }
        }
    }
    return false;
}

static acr_status lay_out(elf_code *code, const elf_object *o, const char *path, const char *symbol)
{
    code->size = size_in_memory(o);
    code->bytes = code->size > 0 ? calloc(1, code->size) : NULL;
    if (!code->bytes || !lay_out_segments(code, o)) {
        return acr__fail(ACR_FORMAT, "%s: no loadable code", path);
    }
    for (size_t i = 0; i < o->count; ++i) {
        const Elf64_Shdr *s = &o->sections[i];
        const bool loaded = (s->sh_flags & SHF_ALLOC) != 0;
        if ((s->sh_type == SHT_RELA && loaded && !relocate(code, o, s)) || (s->sh_type == SHT_REL && loaded)) {
            return acr__fail(ACR_FORMAT, "%s: %s: relocations that need a loader", path, elf_section_name(o, s));
        }
    }
    return !symbol || find_entry(code, o, symbol)
               ? ACR_OK
               : acr__fail(ACR_FORMAT, "%s: the object does not define its entry point, KERNEL_NAME", path);
}

void elf_code_free(elf_code *code)
{
    free(code->bytes);
    free(code->addresses);
    *code = (elf_code){.bytes = NULL};
}

acr_status elf_code_read(elf_code *out, const char *path, const char *symbol)
{
    const void *bytes;
    size_t size;
    elf_object o;
    elf_code code = {.bytes = NULL};
    acr_status status = file_map(path, &bytes, &size);
    if (status != ACR_OK) {
        return status;
    }
    status = elf_open(&o, bytes, size) ? lay_out(&code, &o, path, symbol)
                                       : acr__fail(ACR_FORMAT, "%s: not a 64-bit ELF object", path);
    file_unmap(bytes, size);
    if (status != ACR_OK) {
        elf_code_free(&code);
        return status;
    }
    *out = code;
    return ACR_OK;
}

void elf_code_place(unsigned char *to, const elf_code *code, uintptr_t at)
{
    memcpy(to, code->bytes, code->size);
    for (size_t i = 0; i < code->address_count; ++i) {
        uint64_t address;
        memcpy(&address, to + code->addresses[i], sizeof address);
        address += at;
        memcpy(to + code->addresses[i], &address, sizeof address);
    }
}
