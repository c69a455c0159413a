/* ELF objects of candidates, see identity.h. */
#include "identity.h"

#include <elf.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/files.h"

enum {
    MACHINE_CUDA = 190, /* EM_CUDA, which not every elf.h knows */
    SECTIONS_MAX = 4096
};

/* A file in memory, with its tables. */
typedef struct object {
    const unsigned char *bytes;
    size_t size;
    const Elf64_Ehdr *header;
    const Elf64_Shdr *sections;
    size_t count;
    const char *names;
    size_t names_bytes;
} object;

static bool inside(const object *o, uint64_t offset, uint64_t bytes)
{
    return offset <= o->size && bytes <= o->size - offset;
}

/* False when it is no whole 64-bit little-endian ELF file. */
static bool open_object(object *o)
{
    const Elf64_Ehdr *h = (const Elf64_Ehdr *)(const void *)o->bytes;
    if (o->size < sizeof *h || memcmp(h->e_ident, ELFMAG, SELFMAG) != 0 || h->e_ident[EI_CLASS] != ELFCLASS64 ||
        h->e_ident[EI_DATA] != ELFDATA2LSB || h->e_shentsize != sizeof(Elf64_Shdr) || h->e_shnum > SECTIONS_MAX ||
        h->e_shoff % _Alignof(Elf64_Shdr) != 0 || h->e_shstrndx >= h->e_shnum ||
        !inside(o, h->e_shoff, (uint64_t)h->e_shnum * sizeof(Elf64_Shdr))) {
        return false;
    }
    o->header = h;
    o->sections = (const Elf64_Shdr *)(const void *)(o->bytes + h->e_shoff);
    o->count = h->e_shnum;
    const Elf64_Shdr *names = &o->sections[h->e_shstrndx];
    if (!inside(o, names->sh_offset, names->sh_size) || names->sh_size == 0 ||
        o->bytes[names->sh_offset + names->sh_size - 1] != '\0') {
        return false;
    }
    o->names = (const char *)o->bytes + names->sh_offset;
    o->names_bytes = names->sh_size;
    for (size_t i = 0; i < o->count; ++i) {
        const Elf64_Shdr *s = &o->sections[i];
        if (s->sh_name >= o->names_bytes || (s->sh_type != SHT_NOBITS && !inside(o, s->sh_offset, s->sh_size))) {
            return false;
        }
    }
    return true;
}

static const char *name_of(const object *o, const Elf64_Shdr *s)
{
    return o->names + s->sh_name;
}

static bool begins(const char *text, const char *with)
{
    return strncmp(text, with, strlen(with)) == 0;
}

/* ---- What is refused ---- */

static void refuse(object_facts *facts, const char *format, const char *name)
{
    if (!facts->refusal[0]) {
        snprintf(facts->refusal, sizeof facts->refusal, format, name);
    }
}

/* Undefined symbols: what the object would call. */
static void look_at_symbols(object_facts *facts, const object *o, const Elf64_Shdr *table)
{
    if (table->sh_entsize != sizeof(Elf64_Sym) || table->sh_link >= o->count ||
        table->sh_offset % _Alignof(Elf64_Sym) != 0) {
        refuse(facts, "%s: a malformed symbol table", name_of(o, table));
        return;
    }
    const Elf64_Shdr *strings = &o->sections[table->sh_link];
    const Elf64_Sym *symbols = (const Elf64_Sym *)(const void *)(o->bytes + table->sh_offset);
    for (size_t i = 1; i < table->sh_size / sizeof *symbols; ++i) {
        const Elf64_Sym *s = &symbols[i];
        const int type = ELF64_ST_TYPE(s->st_info);
        const bool named = s->st_name > 0 && s->st_name < strings->sh_size;
        const char *name = named ? (const char *)o->bytes + strings->sh_offset + s->st_name : "a symbol without name";
        if (s->st_shndx == SHN_UNDEF && named && !begins(name, ".nv.")) { /* those are the driver's to place */
            refuse(facts, "calls %.100s, which is outside of it", name);
        } else if (type == STT_GNU_IFUNC || type == STT_TLS) {
            refuse(facts, "%.100s is resolved at load time or belongs to a thread", name);
        } else if (s->st_shndx == SHN_COMMON) {
            refuse(facts, "%.100s is state between calls", name);
        }
    }
}

static void look_at_section(object_facts *facts, const object *o, const Elf64_Shdr *s, acr__backend_id backend)
{
    static const char *const at_load[] = {".init",       ".fini",  ".preinit_array", ".init_array",
                                          ".fini_array", ".ctors", ".dtors"};
    const char *name = name_of(o, s);
    if (backend == ACR__CUDA) {
        if (begins(name, ".nv.global") && s->sh_size > 0) {
            refuse(facts, "%.100s: writable global memory, which is state between launches", name);
        }
        return;
    }
    for (size_t i = 0; i < sizeof at_load / sizeof at_load[0]; ++i) {
        if (strcmp(name, at_load[i]) == 0 && s->sh_size > 0) {
            refuse(facts, "%.100s: code that runs when it is loaded", name);
        }
    }
    const bool relocated = begins(name, ".data.rel.ro") || begins(name, ".got") || strcmp(name, ".dynamic") == 0;
    if ((s->sh_flags & (SHF_ALLOC | SHF_WRITE)) == (SHF_ALLOC | SHF_WRITE) && !relocated && s->sh_size > 0) {
        refuse(facts, "%.100s: writable data, which is state between calls", name);
    }
    if ((s->sh_flags & SHF_EXECINSTR) && strcmp(name, ".text") != 0 && !begins(name, ".plt") && s->sh_size > 0) {
        refuse(facts, "%.100s: code outside of .text", name);
    }
    if (s->sh_flags & SHF_TLS) {
        refuse(facts, "%.100s: thread-local data", name);
    }
}

/* ---- What it is ---- */

static bool is_code(const object *o, const Elf64_Shdr *s, acr__backend_id backend)
{
    return backend == ACR__CUDA ? begins(name_of(o, s), ".text") : (s->sh_flags & SHF_EXECINSTR) != 0;
}

static bool is_constant(const object *o, const Elf64_Shdr *s, acr__backend_id backend)
{
    const char *name = name_of(o, s);
    return backend == ACR__CUDA ? begins(name, ".nv.constant")
                                : begins(name, ".rodata") || begins(name, ".data.rel.ro");
}

static int compare_digests(const void *a, const void *b)
{
    return XXH128_cmp(a, b);
}

static void digest_object(object_facts *facts, const object *o, acr__backend_id backend, const char *extra)
{
    static XXH128_hash_t none;
    XXH128_hash_t *digests = calloc(o->count + 1, sizeof *digests), whole = none;
    size_t count = 0;
    for (size_t i = 0; digests && i < o->count; ++i) {
        const Elf64_Shdr *s = &o->sections[i];
        const bool code = is_code(o, s, backend);
        if ((code || is_constant(o, s, backend)) && s->sh_type != SHT_NOBITS && s->sh_size > 0) {
            digests[count++] = XXH3_128bits_withSeed(o->bytes + s->sh_offset, s->sh_size, code);
            facts->code_bytes += code ? (int64_t)s->sh_size : 0;
        }
    }
    if (digests) {
        digests[count] = XXH3_128bits(extra, strlen(extra));
        qsort(digests, count, sizeof *digests, compare_digests);
        whole = XXH3_128bits(digests, (count + 1) * sizeof *digests);
    }
    free(digests);
    snprintf(facts->digest, sizeof facts->digest, "%016" PRIx64 "%016" PRIx64, whole.high64, whole.low64);
}

acr_status object_look(object_facts *out, const char *path, acr__backend_id backend, const char *extra)
{
    const void *bytes;
    object o = {.bytes = NULL};
    acr_status status = file_map(path, &bytes, &o.size);
    if (status != ACR_OK) {
        return status;
    }
    o.bytes = bytes;
    *out = (object_facts){.code_bytes = 0};
    const bool cuda = backend == ACR__CUDA;
    if (!o.bytes || !open_object(&o) || (o.header->e_machine == MACHINE_CUDA) != cuda) {
        status = acr__fail(ACR_FORMAT, "%s: not %s", path, cuda ? "a cubin" : "a 64-bit ELF object");
    }
    for (size_t i = 0; status == ACR_OK && i < o.count; ++i) {
        const Elf64_Shdr *s = &o.sections[i];
        look_at_section(out, &o, s, backend);
        if (s->sh_type == (cuda ? SHT_SYMTAB : SHT_DYNSYM)) {
            look_at_symbols(out, &o, s);
        }
    }
    if (status == ACR_OK) {
        digest_object(out, &o, backend, extra);
    }
    file_unmap(bytes, o.size);
    return status;
}

/* ---- Instructions ---- */

/* "  401000:\tsyscall" -> the instruction, or NULL for other lines. */
static const char *instruction_of(const char *line)
{
    const char *at = line + strspn(line, " ");
    const size_t digits = strspn(at, "0123456789abcdef");
    return digits > 0 && at[digits] == ':' && at[digits + 1] == '\t' ? at + digits + 2 : NULL;
}

static bool is_forbidden(const char *instruction)
{
    static const char *const words[] = {"syscall", "sysenter", "sysexit", "sysret", "int",   "int3",   "into",
                                        "iret",    "in",       "out",     "ins",    "outs",  "hlt",    "rdtsc",
                                        "rdtscp",  "rdpmc",    "rdmsr",   "wrmsr",  "cpuid", "xbegin", "rdrand",
                                        "rdseed",  "rdpid",    "vmcall",  "svc",    "hvc",   "smc",    "(bad)"};
    const size_t length = strcspn(instruction, " \t\n");
    for (size_t i = 0; i < sizeof words / sizeof words[0]; ++i) {
        if (strlen(words[i]) == length && memcmp(words[i], instruction, length) == 0) {
            return true;
        }
    }
    return strstr(instruction, "%fs:") || strstr(instruction, "%gs:") || strstr(instruction, "tpidr_el0") ||
           strstr(instruction, "fsbase") || strstr(instruction, "gsbase") || strstr(instruction, "cntvct_el0");
}

acr_status disassembly_look(char refusal[256], const char *path)
{
    FILE *file = fopen(path, "r");
    if (!file) {
        return acr__fail(ACR_IO, "%s: cannot be read", path);
    }
    char line[512];
    size_t instructions = 0;
    refusal[0] = '\0';
    while (!refusal[0] && fgets(line, sizeof line, file)) {
        const char *instruction = instruction_of(line);
        instructions += instruction != NULL;
        if (instruction && is_forbidden(instruction)) {
            line[strcspn(line, "\n")] = '\0';
            snprintf(refusal, 256, "the instruction \"%.200s\"", line + strspn(line, " "));
        }
    }
    fclose(file);
    return instructions > 0 ? ACR_OK : acr__fail(ACR_IO, "%s: no disassembly", path);
}
