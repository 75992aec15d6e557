// What the C++ tests of this folder count as failures. For one file of a program.
#pragma once

#include <cstdio>

namespace {

int failures = 0;
#define CHECK(what)                                                                                \
    do {                                                                                           \
        if (!(what)) {                                                                             \
            std::printf("%s:%d: not true: %s\n", __FILE__, __LINE__, #what);                       \
            ++failures;                                                                            \
        }                                                                                          \
    } while (0)

int verdict() {
    std::printf(failures ? "%d checks failed\n" : "all checks passed\n", failures);
    return failures ? 1 : 0;
}

} // namespace
