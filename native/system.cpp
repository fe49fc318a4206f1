// system: two questions to the operating system that Python has no words for.

#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tiermem.h"

// Linux 6.1; older headers lack the names, and their struct statx the two fields (bytes 152 to 159).
static const unsigned MASK_DIOALIGN = 0x2000;
static const size_t OFFSET_OF_DIOALIGN = 152;

int tm_file_alignment(int32_t fd, uint32_t *memory, uint32_t *offset) {
    if (!memory || !offset)
        return -EINVAL;
    alignas(8) char answer[256] = {};
    if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, MASK_DIOALIGN, answer) != 0)
        return -errno;
    uint32_t mask;
    memcpy(&mask, answer, sizeof mask);
    if (!(mask & MASK_DIOALIGN))
        return -ENOSYS;
    memcpy(memory, answer + OFFSET_OF_DIOALIGN, sizeof *memory);
    memcpy(offset, answer + OFFSET_OF_DIOALIGN + sizeof *memory, sizeof *offset);
    return 0;
}

int tm_heap_trim(void) {
#ifdef __GLIBC__
    return malloc_trim(0);
#else
    return 0;
#endif
}
