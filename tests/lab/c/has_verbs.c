/* Exit status 0 when this kvrail has the verbs driver, 77 when not; the last line says so. */
#include <stdio.h>

#include "kvrail.h"

int main(void) {
    kvr_config config;
    char text[512];
    if (kvr_config_init(&config, sizeof config) < 0) {
        kvr_last_error(text, sizeof text);
        printf("has_verbs: no defaults: %s\n", text);
        return 1;
    }
    if (kvr_config_set(&config, "transport", "verbs") < 0) {
        kvr_last_error(text, sizeof text);
        printf("needs the verbs transport, which this kvrail refuses: %.150s\n", text);
        return 77;
    }
    printf("this kvrail has the verbs transport\n");
    return 0;
}
