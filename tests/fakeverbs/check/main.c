/* Runs each check in a process of its own, so that knobs and counters start afresh.
 * usage: check [PART-OF-A-NAME]
 */
#include "check.h"

#include <sys/wait.h>

static int complaints;
const char *program;

void complain(const char *file, int line, const char *what, long long got, long long want) {
    fprintf(stderr, "%s:%d: %s is %lld, not %lld\n", file, line, what, got, want);
    complaints++;
}

static void set_env(const char *env) {
    char text[512], *save;
    if (env == NULL) return;
    snprintf(text, sizeof text, "%s", env);
    for (char *t = strtok_r(text, " ", &save); t != NULL; t = strtok_r(NULL, " ", &save)) {
        char *eq = strchr(t, '=');
        *eq = '\0';
        setenv(t, eq + 1, 1);
    }
}

static bool run_one(const struct check *c) {
    int status;
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        set_env(c->env);
        alarm(120);
        c->run();
        exit(complaints != 0);
    }
    waitpid(pid, &status, 0);
    bool good = WIFEXITED(status) && WEXITSTATUS(status) == 0;
    if (!good) printf("FAILED %s (wait status %d)\n", c->name, status);
    return good;
}

int main(int argc, char **argv) {
    const struct check *const GROUPS[] = {STATE_CHECKS, DATA_CHECKS,    FAULT_CHECKS, EVENT_CHECKS,
                                          CALL_CHECKS,  PROCESS_CHECKS, NULL_CHECKS};
    int passed = 0, failed = 0;
    program = argv[0];
    if (argc == 3 && strcmp(argv[1], "--worker") == 0) return worker(atoi(argv[2]));
    for (size_t g = 0; g < sizeof GROUPS / sizeof GROUPS[0]; g++) {
        for (const struct check *c = GROUPS[g]; c->name != NULL; c++) {
            if (argc > 1 && strstr(c->name, argv[1]) == NULL) continue;
            if (run_one(c))
                passed++;
            else
                failed++;
        }
    }
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
