/* ELF objects of candidates, see identity.h. */
#include "identity.h"

#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "elf_object.h"
#include "base/files.h"

enum {
    MACHINE_CUDA = 190 /* EM_CUDA, which not every elf.h knows */
};

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

static bool is_one_of(const char *const *names, const char *name)
{
    for (; *names; ++names) {
        if (strcmp(*names, name) == 0) {
            return true;
        }
    }
    return false;
}

/* Undefined symbols: what the object would call. Of a CPU's object the local ones too: a resolver needs no other. */
static void look_at_symbols(object_facts *facts, const elf_object *o, const Elf64_Shdr *table)
{
    size_t count;
    const Elf64_Sym *symbols = elf_symbols(o, table, &count);
    if (!symbols) {
        refuse(facts, "%s: a malformed symbol table", elf_section_name(o, table));
        return;
    }
    for (size_t i = 1; i < count; ++i) {
        const Elf64_Sym *s = &symbols[i];
        const int type = ELF64_ST_TYPE(s->st_info);
        const char *named = elf_symbol_name(o, table, s), *name = named ? named : "a symbol without name";
        if (s->st_shndx == SHN_UNDEF && named && !begins(name, ".nv.")) { /* those are the driver's to place */
            refuse(facts, "calls %.100s, which is outside of it", name);
        } else if (type == STT_GNU_IFUNC) {
            refuse(facts, "%.100s is resolved at load time, by code of its own", name);
        } else if (type == STT_TLS) {
            refuse(facts, "%.100s belongs to a thread", name);
        } else if (s->st_shndx == SHN_COMMON) {
            refuse(facts, "%.100s is state between calls", name);
        }
    }
}

/* What a CPU's object may consist of, by name and kind. Everything else is refused, whatever it is for. */
static void look_at_cpu_section(object_facts *facts, const elf_object *o, const Elf64_Shdr *s)
{
    static const char *const plain[] = {
        ".text",           ".rodata", ".eh_frame",    ".eh_frame_hdr",  ".dynsym",   ".dynstr",
        ".gnu.hash",       ".hash",   ".gnu.version", ".gnu.version_d", ".rela.dyn", ".note.gnu.property",
        ".note.GNU-stack", NULL};
    static const char *const relocated[] = {".dynamic", ".got", ".data.rel.ro", ".data.rel.ro.local", NULL};
    static const char *const at_load[] = {".init",  ".fini",  ".preinit_array", ".init_array", ".fini_array",
                                          ".ctors", ".dtors", ".jcr",           NULL};
    const char *name = elf_section_name(o, s);
    if (!(s->sh_flags & SHF_ALLOC) || s->sh_size == 0) {
        return;
    }
    const bool code = strcmp(name, ".text") == 0, writable = (s->sh_flags & SHF_WRITE) != 0;
    const bool array = s->sh_type == SHT_INIT_ARRAY || s->sh_type == SHT_FINI_ARRAY || s->sh_type == SHT_PREINIT_ARRAY;
    if (array || is_one_of(at_load, name) || begins(name, ".init_array") || begins(name, ".ctors")) {
        refuse(facts, "%.100s: code that runs when it is loaded", name);
    } else if (s->sh_flags & SHF_TLS) {
        refuse(facts, "%.100s: thread-local data", name);
    } else if (((s->sh_flags & SHF_EXECINSTR) != 0) != code) {
        refuse(facts, "%.100s: code outside of .text, or none in it", name);
    } else if (writable && !is_one_of(relocated, name) && !(strcmp(name, ".got.plt") == 0 && s->sh_size <= 24)) {
        refuse(facts, "%.100s: writable data, which is state between calls", name);
    } else if (!writable && !is_one_of(plain, name) && !begins(name, ".rodata.")) {
        refuse(facts, "%.100s: a section that no kernel needs", name);
    }
}

static bool covers(const Elf64_Phdr *p, uint64_t first, uint64_t end)
{
    return first >= p->p_vaddr && end <= p->p_vaddr + p->p_memsz;
}

/* The part that is read-only once addresses are in place. NULL where there is none. */
static const Elf64_Phdr *relocated_part(const elf_object *o)
{
    const Elf64_Phdr *found = NULL;
    for (size_t i = 0; i < o->segment_count; ++i) {
        found = o->segments[i].p_type == PT_GNU_RELRO ? &o->segments[i] : found;
    }
    return found;
}

static void look_at_segments(object_facts *facts, const elf_object *o)
{
    const Elf64_Phdr *relocated = relocated_part(o);
    for (size_t i = 0; i < o->segment_count; ++i) {
        const Elf64_Phdr *p = &o->segments[i];
        const bool writable = p->p_type == PT_LOAD && (p->p_flags & PF_W) && p->p_memsz > 0;
        if (p->p_type == PT_INTERP || p->p_type == PT_TLS) {
            refuse(facts, "%s of its own", p->p_type == PT_TLS ? "thread-local data" : "a loader");
        } else if ((p->p_type == PT_LOAD || p->p_type == PT_GNU_STACK) && (p->p_flags & PF_W) && (p->p_flags & PF_X)) {
            refuse(facts, "%s that is writable and executable", p->p_type == PT_LOAD ? "memory" : "a stack");
        } else if (writable && !(relocated && covers(relocated, p->p_vaddr, p->p_vaddr + p->p_memsz))) {
            refuse(facts, "%s that stays writable, which is state between calls", "memory");
        }
    }
}

/* What a loader would be told to do. */
static void look_at_dynamic(object_facts *facts, const elf_object *o, const Elf64_Shdr *s)
{
    static const int64_t allowed[] = {DT_NULL,      DT_HASH,     DT_GNU_HASH, DT_STRTAB, DT_SYMTAB,
                                      DT_STRSZ,     DT_SYMENT,   DT_RELA,     DT_RELASZ, DT_RELAENT,
                                      DT_RELACOUNT, DT_FLAGS,    DT_FLAGS_1,  DT_VERSYM, DT_VERDEF,
                                      DT_VERDEFNUM, DT_BIND_NOW, DT_SYMBOLIC, DT_PLTGOT};
    const Elf64_Dyn *entries = (const Elf64_Dyn *)(const void *)(o->bytes + s->sh_offset);
    for (size_t i = 0; s->sh_offset % 8 == 0 && i < s->sh_size / sizeof *entries; ++i) {
        bool known = false;
        for (size_t j = 0; j < sizeof allowed / sizeof allowed[0]; ++j) {
            known = known || entries[i].d_tag == allowed[j];
        }
        if (!known) {
            char tag[40];
            snprintf(tag, sizeof tag, "tag %#llx%s", (unsigned long long)entries[i].d_tag,
                     entries[i].d_tag == DT_NEEDED ? " (another library)" : "");
            refuse(facts, "%s: more than placing is asked of the loader", tag);
        }
    }
}

static void look_at_relocations(object_facts *facts, const elf_object *o, const Elf64_Shdr *s)
{
    size_t count;
    const Elf64_Phdr *part = relocated_part(o);
    const Elf64_Rela *entries = s->sh_type == SHT_RELA ? elf_relocations(o, s, &count) : NULL;
    for (size_t i = 0; entries && i < count; ++i) {
        const uint64_t at = entries[i].r_offset;
        if (!elf_is_relative(o, &entries[i]) || !part || !covers(part, at, at + sizeof(uint64_t))) {
            char kind[40];
            snprintf(kind, sizeof kind, "relocation %llu", (unsigned long long)ELF64_R_TYPE(entries[i].r_info));
            refuse(facts, "%s: only addresses of its own constants are placed", kind);
        }
    }
    if (!entries && s->sh_size > 0) {
        refuse(facts, "%.100s: relocations in a form of their own", elf_section_name(o, s));
    }
}

static void look_at_cpu_object(object_facts *facts, const elf_object *o)
{
    if (o->header->e_type != ET_DYN) {
        refuse(facts, "%s", "no shared object");
    }
    for (size_t i = 0; i < o->count; ++i) {
        const Elf64_Shdr *s = &o->sections[i];
        const bool relr = s->sh_type == 19 /* SHT_RELR, which not every elf.h knows */;
        look_at_cpu_section(facts, o, s);
        if (s->sh_type == SHT_DYNSYM || s->sh_type == SHT_SYMTAB) {
            look_at_symbols(facts, o, s);
        } else if (s->sh_type == SHT_DYNAMIC) {
            look_at_dynamic(facts, o, s);
        } else if ((s->sh_flags & SHF_ALLOC) && (s->sh_type == SHT_RELA || s->sh_type == SHT_REL || relr)) {
            look_at_relocations(facts, o, s);
        }
    }
    look_at_segments(facts, o);
}

static void look_at_cubin(object_facts *facts, const elf_object *o)
{
    for (size_t i = 0; i < o->count; ++i) {
        const Elf64_Shdr *s = &o->sections[i];
        const char *name = elf_section_name(o, s);
        const bool writable = (s->sh_flags & SHF_WRITE) && !begins(name, ".nv.shared") && !begins(name, ".nv.reserved");
        if ((begins(name, ".nv.global") || writable) && s->sh_size > 0) {
            refuse(facts, "%.100s: writable global memory, which is state between launches", name);
        }
        if (s->sh_type == SHT_SYMTAB) {
            look_at_symbols(facts, o, s);
        }
    }
}

/* ---- What it is ---- */

static bool is_code(const elf_object *o, const Elf64_Shdr *s, acr__backend_id backend)
{
    return backend == ACR__CUDA ? begins(elf_section_name(o, s), ".text") : (s->sh_flags & SHF_EXECINSTR) != 0;
}

static bool is_constant(const elf_object *o, const Elf64_Shdr *s, acr__backend_id backend)
{
    const char *name = elf_section_name(o, s);
    return backend == ACR__CUDA ? begins(name, ".nv.constant")
                                : begins(name, ".rodata") || begins(name, ".data.rel.ro");
}

static int compare_digests(const void *a, const void *b)
{
    return XXH128_cmp(a, b);
}

static void digest_object(object_facts *facts, const elf_object *o, acr__backend_id backend, const char *extra)
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
    size_t size;
    elf_object o;
    acr_status status = file_map(path, &bytes, &size);
    if (status != ACR_OK) {
        return status;
    }
    *out = (object_facts){.code_bytes = 0};
    const bool cuda = backend == ACR__CUDA;
    if (!elf_open(&o, bytes, size) || (o.header->e_machine == MACHINE_CUDA) != cuda) {
        status = acr__fail(ACR_FORMAT, "%s: not %s", path, cuda ? "a cubin" : "a 64-bit ELF object");
    } else if (cuda) {
        look_at_cubin(out, &o);
    } else {
        look_at_cpu_object(out, &o);
    }
    if (status == ACR_OK) {
        digest_object(out, &o, backend, extra);
    }
    file_unmap(bytes, size);
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
    static const char *const words[] = {
        /* the system, other modes of the processor */
        "syscall", "sysenter", "sysexit", "sysret", "int", "int1", "int3", "icebp", "into", "iret", "iretq", "iretl",
        "iretw", "lcall", "lcallq", "lcallw", "lcalll", "ljmp", "ljmpq", "ljmpl", "ljmpw", "lret", "lretq", "lretw",
        "lretl", "in", "out", "ins", "outs", "insb", "insw", "insl", "outsb", "outsw", "outsl", "hlt", "vmcall",
        "vmmcall", "vmfunc", "getsec", "enclu", "svc", "hvc", "smc", "brk", "(bad)", ".byte", ".inst",
        /* clocks, counters, chance, what the machine is or does */
        "rdtsc", "rdtscp", "rdpmc", "rdmsr", "wrmsr", "rdrand", "rdseed", "rdpid", "rdpru", "cpuid", "xgetbv", "xsetbv",
        "monitor", "mwait", "monitorx", "mwaitx", "umonitor", "umwait", "tpause", "sgdt", "sidt", "sldt", "str", "smsw",
        "lsl", "lar", "verr", "verw",
        /* faults that go unseen, caches emptied to be timed */
        "xbegin", "xend", "xabort", "xtest", "clflush", "clflushopt", "clwb", "cldemote",
        /* the rights of pages, shadow stacks, whole register files */
        "rdpkru", "wrpkru", "rdsspq", "rdsspd", "incsspq", "incsspd", "wrussq", "wrssq", "saveprevssp", "rstorssp",
        "xsave", "xsavec", "xsaveopt", "xsaves", "xrstor", "xrstors", "xsave64", "xsavec64", "xsaveopt64", "xrstor64",
        "fxsave", "fxrstor", "fxsave64", "fxrstor64", "ptwrite", "enqcmd", "popf", "popfq"};
    static const char *const operands[] = {"%fs",   "%gs",    "%cs",    "%ds",    "%es",     "%ss", "fsbase", "gsbase",
                                           "tpidr", "cntvct", "cntpct", "cntfrq", "pmccntr", "%dr", "%cr"};
    size_t length = strcspn(instruction, " \t\n");
    while (strncmp(instruction, "rep", 3) == 0 || strncmp(instruction, "lock", 4) == 0 ||
           strncmp(instruction, "data16", 6) == 0 || strncmp(instruction, "addr32", 6) == 0 ||
           strncmp(instruction, "rex", 3) == 0 || strncmp(instruction, "notrack", 7) == 0) { /* prefixes */
        const size_t blanks = strspn(instruction + length, " \t");
        if (blanks == 0) {
            break;
        }
        instruction += length + blanks;
        length = strcspn(instruction, " \t\n");
    }
    for (size_t i = 0; i < sizeof words / sizeof words[0]; ++i) {
        if (strlen(words[i]) == length && memcmp(words[i], instruction, length) == 0) {
            return true;
        }
    }
    /* Padding between functions is a no-operation that names a segment. */
    for (size_t i = 0; strncmp(instruction, "nop", 3) != 0 && strncmp(instruction, "cs nop", 6) != 0 &&
                       i < sizeof operands / sizeof operands[0];
         ++i) {
        for (const char *at = instruction; (at = strstr(at, operands[i])) != NULL; ++at) {
            const char after = at[strlen(operands[i])];
            const bool thread = at[1] == 'f' || at[1] == 'g'; /* string instructions name %es: and %ds: */
            if (operands[i][0] != '%' || (!isalpha((unsigned char)after) && (thread || after != ':'))) {
                return true;
            }
        }
    }
    return false;
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

/* ---- PTX ---- */

acr_status ptx_look(char refusal[256], const char *path)
{
    static const struct {
        const char *words, *why;
    } refused[] = {{"%clock", "reads a clock"},
                   {"%globaltimer", "reads a clock"},
                   {"%pm", "reads a counter of events"},
                   {"%envreg", "reads what the driver knows"},
                   {"nanosleep", "waits"},
                   {"pmevent", "talks to a profiler"},
                   {"brkpt", "talks to a debugger"},
                   {".extern .func", "calls what is outside of it"},
                   {".extern .global", "uses what is outside of it"},
                   {".visible .global", "state between launches"},
                   {".managed", "state between launches"}};
    FILE *file = fopen(path, "r");
    if (!file) {
        return acr__fail(ACR_IO, "%s: cannot be read", path);
    }
    char *line = NULL;
    size_t capacity = 0, lines = 0;
    refusal[0] = '\0';
    while (!refusal[0] && getline(&line, &capacity, file) >= 0) {
        ++lines;
        const bool comment = begins(line, "//");
        for (size_t i = 0; !comment && !refusal[0] && i < sizeof refused / sizeof refused[0]; ++i) {
            if (strstr(line, refused[i].words)) {
                line[strcspn(line, "\n")] = '\0';
                snprintf(refusal, 256, "PTX, \"%.150s\": %s", line + strspn(line, " \t"), refused[i].why);
            }
        }
    }
    free(line);
    fclose(file);
    return lines > 0 ? ACR_OK : acr__fail(ACR_IO, "%s: no PTX", path);
}
