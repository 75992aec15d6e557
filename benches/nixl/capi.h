/* What work.c calls of the wheel's libnixl_capi.so: the C face of NIXL's agent. Declared here from
 * the library's exports and by running against nixl-cu12 1.5.1; no NIXL header is used.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

enum { NIXL_OK = 0, NIXL_IN_PROGRESS = 1 };
enum { NIXL_DRAM = 0 };
enum { NIXL_READ = 0, NIXL_WRITE = 1 };

typedef struct agent *agent_t;
typedef struct backend *backend_t;
typedef struct params *params_t;
typedef struct mems *mems_t;
typedef struct opts *opts_t;
typedef struct reg_list *reg_list_t;
typedef struct xfer_list *xfer_list_t;
typedef struct prepped *prepped_t;
typedef struct request *request_t;

int nixl_capi_create_agent(const char *name, agent_t *out);
int nixl_capi_destroy_agent(agent_t);
int nixl_capi_create_params(params_t *out);
int nixl_capi_params_add(params_t, const char *key, const char *value);
int nixl_capi_destroy_params(params_t);
int nixl_capi_create_backend(agent_t, const char *plugin, params_t, backend_t *out);
int nixl_capi_create_opt_args(opts_t *out);
int nixl_capi_opt_args_add_backend(opts_t, backend_t);
int nixl_capi_create_reg_dlist(int mem, reg_list_t *out);
int nixl_capi_reg_dlist_add_desc(reg_list_t, uintptr_t addr, size_t len, uint64_t dev,
                                 const void *meta, size_t meta_len);
int nixl_capi_register_mem(agent_t, reg_list_t, opts_t);
int nixl_capi_deregister_mem(agent_t, reg_list_t, opts_t);
int nixl_capi_get_local_md(agent_t, void **data, size_t *len);
int nixl_capi_load_remote_md(agent_t, const void *data, size_t len, char **name);
int nixl_capi_agent_make_connection(agent_t, const char *remote, opts_t);
int nixl_capi_create_xfer_dlist(int mem, xfer_list_t *out);
int nixl_capi_destroy_xfer_dlist(xfer_list_t);
int nixl_capi_xfer_dlist_add_desc(xfer_list_t, uintptr_t addr, size_t len, uint64_t dev);
int nixl_capi_prep_xfer_dlist(agent_t, const char *name, xfer_list_t, prepped_t *out, opts_t);
int nixl_capi_release_xfer_dlist_handle(agent_t, prepped_t);
int nixl_capi_make_xfer_req(agent_t, int op, prepped_t local, const int *local_indices,
                            size_t local_count, prepped_t remote, const int *remote_indices,
                            size_t remote_count, request_t *out, opts_t);
int nixl_capi_post_xfer_req(agent_t, request_t, opts_t);
int nixl_capi_get_xfer_status(agent_t, request_t);
int nixl_capi_release_xfer_req(agent_t, request_t);
int nixl_capi_destroy_xfer_req(request_t);
int nixl_capi_invalidate_remote_md(agent_t, const char *name);
