/* Arrays that grow by one item, and blocks of memory that end together. */
#ifndef WORKBENCH_MEMORY_H
#define WORKBENCH_MEMORY_H

#include <stddef.h>
#include <stdlib.h>

/* The array with room for one more than `count` items of so many bytes: the same, or moved and twice as large. NULL
 * when out of memory; then it is as it was. */
static inline void *room_for_one(void *items, size_t count, size_t *capacity, size_t item_bytes)
{
    enum {
        FIRST_CAPACITY = 64
    };
    if (count < *capacity) {
        return items;
    }
    const size_t more = *capacity ? 2 * *capacity : FIRST_CAPACITY;
    void *longer = realloc(items, more * item_bytes);
    *capacity = longer ? more : *capacity;
    return longer;
}

static inline void free_all(void *const *blocks, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        free(blocks[i]);
    }
}

/* Frees each of these pointers, of any type; NULL is none. */
#define FREE_ALL(...) free_all((void *[]){__VA_ARGS__}, sizeof((void *[]){__VA_ARGS__}) / sizeof(void *))

#endif
