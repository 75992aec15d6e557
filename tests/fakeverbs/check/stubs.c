#include "check.h"
const struct check STATE_CHECKS[1], FAULT_CHECKS[1], EVENT_CHECKS[1], CALL_CHECKS[1], NULL_CHECKS[1];
