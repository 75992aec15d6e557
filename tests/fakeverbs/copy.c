/* Copies between registered memory and packets.
 *
 * Two threads of one process meet in a completion queue's lock, so their copies are plain ones,
 * and a sanitizer sees who reads or frees too early. A WRITE or READ from another process is DMA:
 * its owner learns of it by a message that no race detector follows, so such a copy is hidden from
 * ThreadSanitizer and helgrind (from AddressSanitizer and memcheck only where the former runs).
 */
#include "fake.h"

extern void __tsan_init(void) __attribute__((weak));

__attribute__((no_sanitize("thread"))) static void hidden(uint8_t *to, const uint8_t *from,
                                                          size_t n) {
#if defined(__x86_64__)
    __asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(n) : : "memory");
#else
    volatile uint8_t *v = to;
    for (size_t i = 0; i < n; i++) v[i] = from[i];
#endif
}

void fv_copy(void *to, const void *from, size_t n, bool foreign) {
    if (!foreign) {
        memcpy(to, from, n);
        return;
    }
    FV_UNTRACKED(to, n);
    FV_UNTRACKED(from, n);
    if (__tsan_init != NULL)
        hidden(to, from, n);
    else
        memcpy(to, from, n);
}
