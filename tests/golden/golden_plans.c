/* What ESTIMATE chooses, for problems of every kind on several devices, against golden/plans.txt. A change of cost
 * models or of the kernel list shows there as a diff to be read and judged:
 *     golden_plans FILE            compares; exit code 1 and the lines that differ when they do
 *     golden_plans --update FILE   rewrites the file */
#include <stdio.h>
#include <string.h>

#include "devices.h"
#include "internal.h"

static const char *const problems[] = {
    /* the mission and its neighbours */
    "b2:h8:s512:d64",
    "b2:h8:s512:d64:causal",
    "bf16:b2:h8:s512:d64",
    "f32:b2:h8:s512:d64",
    "e4m3:b2:h8:s512:d64",
    "b2:h8:s512:d64:bshd",
    "b2:h8:s512:d64:lse",
    "b2:h8:s512:d64:kvlens",
    "b2:h8:s512:d64:bshd:packed",
    "bf16:b16:h32/8:s8192:d128:causal:bshd:packed",
    "f32:b2:h8:s512:d64:bshd:packed",
    "b1:h1:s512:d64",
    "b32:h8:s512:d64",
    /* other head dims */
    "b2:h8:s512:d32",
    "b2:h8:s512:d40",
    "b2:h8:s512:d80",
    "b2:h8:s512:d96",
    "b2:h8:s512:d128",
    "bf16:b2:h8:s512:d128:causal",
    "b2:h8:s512:d192",
    "b2:h8:s512:d256",
    "b2:h8:s512:d192/128",
    "b2:h8:s512:d264",
    "b2:h8:s512:d1025",
    /* training and prefill */
    "b4:h16:s2048:d64",
    "b4:h16:s2048:d128",
    "bf16:b4:h16:s2048:d128:causal",
    "e4m3:b4:h16:s2048:d128",
    "e4m3:b2:h16:s4096:d192/128:causal",
    "e4m3:b2:h8:s2048:d256",
    "b1:h16:s16384:d128:causal",
    "b1:h16:s16384:d128:causal:win1024",
    "bf16:b1:h64/8:s8192:d64:causal:win128:sinks",
    "bf16:b2:h16:s4096:d128:causal:alibi",
    "b2:h16:s4096:d64:causal:kvstarts",
    "bf16:b1:h16:s8192:d128:causal:chunk1024",
    "bf16:b2:h16:s4096:d128:causal:cap50",
    "bf16:b2:h16:s4096:d128:causal:cap50:sinks",
    "bf16:b2:h16:s4096:d128:bias-bf16/0,16777216,4096",
    "b2:h16:s4096:d128:bias-f32/0,16777216,4096",
    "bf16:b2:h16:s4096:d128:mask/0,0,4096",
    "b8:h16:s512:d64:mask/512,0,0",
    "bwd:bf16:b8:h16:s4096/77:d128",
    "bwd:b4:h16:s2048:d128",
    "b4:h32/8:s2048:d128:causal:bshd:packed:sinks",
    "b2:h8:s512:d64:causal:sinks",
    "b2:h8:s512:d64:cap50",
    "b1:h16/2:s512:d64:causal:win128:sinks",
    "b2:h8:s512:d128:causal:win128",
    "b1:h32/8:s1/2048:d128:kvlens:page16",
    "b1:h32/8:s1/8192:d128:kvlens:page16",
    "b1:h32/8:s1/32768:d128:kvlens:page16",
    "b2:h32/8:s1/2048:d128:kvlens:page16",
    "bwd:bf16:b4:h8:s2048:d256:causal",
    "b1:h64/8:s8192:d64:causal:win128",
    "b1:h64/8:s8192:d64:causal",
    "f32:b2:h8:s2048:d64:win256/128",
    "e4m3:b4:h16:s4096:d128:causal:win1024",
    "b8:h32/8:s2048:d128:causal:win512:bshd:packed",
    "b8:h32/8:s2048:d128:causal",
    "b1:h16:s2048:d64",
    "f32:b1:h16:s2048:d64",
    /* gradients: what the Hopper family serves, and what it leaves */
    "bwd:b2:h8:s512:d64",
    "bwd:bf16:b2:h8/2:s300:d64:causal:kvlens",
    "bwd:bf16:b4:h16:s2048:d64:causal",
    "bwd:bf16:b2:h16:s4096:d128:causal",
    "bwd:bf16:b8:h32/8:s2048:d128:causal:bshd:packed",
    "bwd:b2:h16:s1024:d64:causal:cap50",
    "bwd:bf16:b2:h16:s1024:d128:causal:alibi",
    "bwd:b2:h8:s512:d64:align2",
    /* decoding */
    "b1:h32/8:s1/8192:d128",
    "bf16:b64:h32/8:s1/4096:d128:kvlens",
    "b8:h64/8:s4/32768:d128:causal",
    "bf16:b64:h128/1:s1/8192:d576/512:v-in-k",
    "bf16:b64:h16/1:s1/8192:d576/512:v-in-k",
    "b2:h64/1:s2/32768:d576/512:v-in-k",
    "b8:h128/1:s1/8192:d576/512:kvlens:page64:v-in-k",
    "b1:h1:s1:d64",
    /* prompts over caches of e4m3, and a few rows over one */
    "b4:h32/8:s2048:d128:causal:kv-e4m3",
    "bf16:b4:h32/8:s512/8192:d64:causal:kvlens:page16:kv-e4m3",
    "bf16:b4:h32/8:s512/8192:d128:causal:kvlens:page24:kv-e4m3",
    "b32:h32/8:s1/8192:d128:kvlens:page16:kv-e4m3",
    /* packed queries over pages: prompts, a window, pages that no box fits, few queries */
    "b4:h32/8:s2048:d128:causal:bshd:kvlens:packed:page16",
    "bf16:b16:h32/8:s512/8192:d64:causal:win1024:bshd:kvlens:packed:page64",
    "bf16:b16:h32/8:s512/8192:d128:causal:bshd:kvlens:packed:page128:kv-e4m3",
    "b4:h32/8:s2048:d128:causal:bshd:kvlens:packed:page24",
    "bf16:b32:h32/8:s4/8192:d128:causal:bshd:kvlens:packed:page16",
    /* odd ones */
    "b3:h5:s1333:d64",
    "b1:h1:s17/3:d8:align2",
    "bf16:b1:h16:s16384:d128:causal:lse:of32",
    "b2:h8:s512:d64:lse:of32",
    "b2:h8:s512:d192:lse:of32",
    "b2:h8:s512:d64:align2",
    "b2:h8:s512:d64:align8",
    "b2:h8:s512:d33:align2",
    "b2:h8:s512:d64:qs=500000,33000,64",
    "b2:h8:s512:d64:ks=0,32768,64:vs=0,32768,64",
    "f32:b1:h2:s77:d7:align4:causal-tl:lse:kvlens",
};

enum {
    TEXT_BYTES = 1 << 16,
    PROBLEMS = sizeof problems / sizeof problems[0]
};

static const char *choice(const char *problem, const acr__device *device)
{
    acr_problem p;
    if (acr_problem_parse(&p, problem, NULL) != ACR_OK || acr_problem_canonical(&p, &p) != ACR_OK)
        return "no problem"; /* shows in the diff */
    const acr__kernel *kernel = acr__choose(&p, device);
    return kernel ? kernel->name : "-";
}

/* The whole table as text. */
static void print_plans(char text[TEXT_BYTES])
{
    static const char *const labels[] = {"h200", "l4", "cpu-avx512", "cpu-avx2", "cpu-portable"};
    size_t used = (size_t)snprintf(
        text, TEXT_BYTES,
        "# What ESTIMATE chooses; - = nothing can run it. Made by golden_plans --update; review the diff.\n");
    for (size_t d = 0; d < sizeof labels / sizeof labels[0]; d++)
        for (size_t n = 0; n < TEST_DEVICES; n++) {
            if (strcmp(test_devices[n].label, labels[d]) != 0)
                continue;
            used += (size_t)snprintf(text + used, TEXT_BYTES - used, "\n[%s]\n", labels[d]);
            for (size_t i = 0; i < PROBLEMS; i++)
                used += (size_t)snprintf(text + used, TEXT_BYTES - used, "%-44s %s\n", problems[i],
                                         choice(problems[i], &test_devices[n].device));
        }
}

static int update(const char *path, const char *text)
{
    FILE *file = fopen(path, "wb");
    if (!file || fputs(text, file) < 0 || fclose(file) != 0) {
        perror(path);
        return 2;
    }
    return 0;
}

/* The next line of a text without its newline; moves on. */
static size_t next_line(const char **text, const char **line)
{
    const size_t length = strcspn(*text, "\n");
    *line = *text;
    *text += length + ((*text)[length] == '\n');
    return length;
}

static int compare(const char *path, const char *now)
{
    static char golden[TEXT_BYTES];
    FILE *file = fopen(path, "rb");
    if (!file) {
        perror(path);
        return 2;
    }
    golden[fread(golden, 1, sizeof golden - 1, file)] = '\0';
    fclose(file);
    const char *a = golden, *b = now, *device = "";
    int differing = 0;
    while (*a || *b) {
        const char *x, *y;
        const size_t x_length = next_line(&a, &x), y_length = next_line(&b, &y);
        if (y_length && *y == '[')
            device = y;
        if (x_length == y_length && memcmp(x, y, x_length) == 0)
            continue;
        differing++;
        printf("%.*s\n- %.*s\n+ %.*s\n", (int)strcspn(device, "\n"), device, (int)x_length, x, (int)y_length, y);
    }
    if (differing)
        printf("%d lines differ from %s. If that is meant: golden_plans --update %s, and say why in the commit.\n",
               differing, path, path);
    return differing ? 1 : 0;
}

int main(int argc, char **argv)
{
#if !defined __x86_64__
    printf("skipped: the golden plans are those of a build for x86-64, which has all CPU kernels\n");
    return 77;
#endif
    static char text[TEXT_BYTES];
    print_plans(text);
    if (argc == 3 && strcmp(argv[1], "--update") == 0)
        return update(argv[2], text);
    if (argc == 2)
        return compare(argv[1], text);
    fprintf(stderr, "usage: %s [--update] FILE\n", argv[0]);
    return 2;
}
