/* config.h - every setting of kld-server, from one table.
 *
 * KLD_CONFIG_MAP is the only list: it makes the fields of struct kld_config, the --flags, the KLD_…
 * environment variables, the keys of the JSON file and the text of --help. Precedence: flag, then
 * environment, then file (--config PATH), then default. A name with '_' is the flag with '-'
 * (--log-level) and the variable KLD_LOG_LEVEL; the JSON key is the name itself.
 *
 * A struct kld_config is read-only once parsed; the supervisor parses it, its children receive
 * every value as flags (kld_config_arguments()). What of it changes while a server runs is
 * kld_config_adopt()'s to say, and each role's to carry out. Any thread. */
#ifndef KLD_SERVER_CONFIG_H
#define KLD_SERVER_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "proto/status.h"
#include "proto/wire.h"

#define KLD_CONFIG_TEXT_MAX 256 /* bytes of a text setting, NUL included */

#define KLD_DEVICES_MAX KLD_WIRE_DEVICES_MAX /* devices, and so workers, of one server */
#define KLD_DEVICE_NUMBER_MAX 1023

/* Entries of allow_uids and of allow_gids; each is less than UINT32_MAX, which is nobody's. */
#define KLD_PEER_LIST_MAX 64

/* Tensors that clients of a worker show to others at a time, whatever the users' limits are. */
#define KLD_PUBLICATIONS_MAX 4096

/* The most that client_requests_max and client_streams_max may be: each connection costs a place
 * for each reply (nearly 300 bytes) and for each stream (nearly 600), used or not. */
#define KLD_CLIENT_REQUESTS_MAX 65536
#define KLD_CLIENT_STREAMS_MAX 1024

/* X(TYPE, name, default as text, help). Types: TEXT; COUNT (a whole number); BYTES (a whole number,
 * or one with K, M, G or T for powers of 1024); FLAG (true or false); DEVICES ("all", or up to
 * KLD_DEVICES_MAX numbers by comma). config.c checks the values of settings that are a choice and
 * the ranges of numbers. */
#define KLD_CONFIG_MAP(X)                                                                          \
    X(TEXT, http, "127.0.0.1:8080", "ADDR:PORT for HTTP; port 0 picks one; empty: no HTTP")        \
    X(TEXT, metrics_http, "",                                                                      \
      "ADDR:PORT where /metrics and health are served too, and nothing else; needs --http; "       \
      "empty: none")                                                                               \
    X(TEXT, unix, "",                                                                              \
      "path of the Unix socket; empty: kld.sock in $XDG_RUNTIME_DIR/kld or /run/kld")              \
    X(TEXT, backend, "auto", "what computes: auto, cpu or cuda")                                   \
    X(DEVICES, device, "0", "which devices of the back end: all, or numbers by comma")             \
    X(FLAG, peer_access, "false",                                                                  \
      "take GPU memory of other cards too, read and written in place where the hardware can")      \
    X(COUNT, threads, "0", "threads of the CPU back end; 0: one for each CPU")                     \
    X(FLAG, measure_roofline, "false",                                                             \
      "measure at the first start, in up to 1 s, what the device's memory moves: the roofline")    \
    X(BYTES, roofline_bytes_per_s, "0", "or take this for it; 0: not told")                        \
    X(COUNT, spin_us, "50", "how long a device thread, or a CPU worker, polls before it sleeps")   \
    X(TEXT, log_level, "info", "debug, info, warn or error")                                       \
    X(TEXT, log_format, "text", "text or json, one line an event, on standard error")              \
    X(FLAG, insecure_bind, "false",                                                                \
      "allow HTTP on an address that is not loopback without tokens")                              \
    X(TEXT, http_hosts, "",                                                                        \
      "names, by comma, besides localhost and addresses, that HTTP without tokens answers to; *: " \
      "any")                                                                                       \
    X(TEXT, shm_prefix, "",                                                                        \
      "HTTP callers may register shared memory whose key starts so; empty: none")                  \
    X(FLAG, cuda_shm, "false", "HTTP callers may register CUDA memory by its IPC handle")          \
    X(COUNT, unix_mode, "432",                                                                     \
      "permission bits of the Unix socket: decimal 432 or octal 0660, in the file \"0660\"")       \
    X(TEXT, allow_uids, "",                                                                        \
      "uids that may connect to the Unix socket, by comma; empty: any the mode lets in")           \
    X(TEXT, allow_gids, "", "the same for gids; a client passes if either list names it")          \
    X(COUNT, clients_max, "256", "connections on the Unix socket; the gateway has places beside")  \
    X(COUNT, user_clients_max, "0",                                                                \
      "of them for one user; 0: all, with some beyond kept for users who have few")                \
    X(COUNT, hello_ms, "10000", "how long a connection there may take to say HELLO")               \
    X(COUNT, requests_max, "1024", "requests of Unix clients in flight in a worker")               \
    X(COUNT, user_share, "75",                                                                     \
      "percent of what the others leave that one user may have, of requests, memory and names")    \
    X(COUNT, client_requests_max, "64", "requests in flight of one Unix client, up to 65536")      \
    X(COUNT, mappings_max, "0",                                                                    \
      "regions of all Unix clients in memory of the host; 0: 3/4 of vm.max_map_count, or of "      \
      "65530")                                                                                     \
    X(COUNT, client_regions_max, "1024", "regions of one Unix client")                             \
    X(COUNT, client_streams_max, "4", "streams of one Unix client, up to 1024")                    \
    X(COUNT, user_publications_max, "1024", "published tensors of one user, up to 4096")           \
    X(COUNT, cuda_files_max, "1024",                                                               \
      "CUDA allocations sent as descriptors that a worker tells apart; half for one client")       \
    X(COUNT, region_pieces_max, "16384", "CUDA allocations that one region may be made of")        \
    X(BYTES, region_bytes_max, "1T", "one region")                                                 \
    X(BYTES, client_region_bytes_max, "1T", "all regions of one Unix client")                      \
    X(BYTES, shared_bytes_max, "0",                                                                \
      "memory of the host that Unix clients register with a worker; 0: half of it for all "        \
      "workers")                                                                                   \
    X(BYTES, client_shared_bytes_max, "0", "of that for one Unix client; 0: half of it")           \
    X(BYTES, pool_bytes_max, "0",                                                                  \
      "memory pool of the device; 0: half of its memory, of a CPU without staging and a 16th")     \
    X(BYTES, client_pool_bytes_max, "0", "of that for one Unix client; 0: half of it")             \
    X(BYTES, staging_bytes_max, "1G", "shared memory for HTTP bodies and results")                 \
    X(BYTES, body_bytes_max, "64G", "one HTTP body")                                               \
    X(BYTES, json_bytes_max, "16M", "the JSON part of an HTTP body")                               \
    X(COUNT, http_threads, "0", "HTTP loops; 0: one for each four CPUs, 1 to 4")                   \
    X(COUNT, http_spin_us, "30",                                                                   \
      "how long one polls for a reply that is near, then sleeps; with four CPUs for each")         \
    X(COUNT, http_connections_max, "4096", "HTTP connections")                                     \
    X(COUNT, http_idle_ms, "60000", "idle time after which an HTTP connection is closed")          \
    X(COUNT, http_requests_max, "512", "HTTP requests being received or computed")                 \
    X(COUNT, http_wait_ms, "250",                                                                  \
      "how long one above those waits for its turn; 0: refused at once")                           \
    X(COUNT, http_regions_max, "256", "memory regions registered over HTTP, CUDA's among them")    \
    X(BYTES, http_region_bytes_max, "4T", "all of them together")                                  \
    X(COUNT, token_regions_max, "64", "those of one token")                                        \
    X(BYTES, token_region_bytes_max, "1T", "the bytes of those of one token")                      \
    X(COUNT, http_deadline_ms, "60000",                                                            \
      "longest an HTTP request may take, and its deadline; 0: none")                               \
    X(COUNT, event_hold_ms, "10000",                                                               \
      "how long a client's GPU event that does not come may hold up other clients")                \
    X(COUNT, drain_ms, "10000", "time given to requests in flight on SIGTERM")                     \
    X(COUNT, reload_ms, "10000", "time a reload gives its files, then the gateway; 0: any")        \
    X(COUNT, stuck_ms, "60000",                                                                    \
      "time without a sign of life after which worker or gateway is replaced; 0: never")           \
    X(COUNT, start_ms, "60000",                                                                    \
      "the same for its start, until it serves, if that is more; 0: any")                          \
    X(COUNT, restart_ms_max, "5000", "longest pause between restarts of a child that keeps dying") \
    X(COUNT, worker_wait_ms, "4000",                                                               \
      "how long an HTTP request that needs a buffer on a device waits for a silent worker")        \
    X(COUNT, http_slow_ms, "10000", "in that time a client sends or takes the whole message, ...") \
    X(BYTES, http_slow_bytes, "10K", "... or at least so much of it; else it is cut off")          \
    X(COUNT, http_slow_parts, "64",                                                                \
      "or, if that is more, one part in N of the staging, and wanted device memory, it holds")     \
    X(COUNT, http_parting_ms, "30000",                                                             \
      "how long what clients still send is dropped once they had their last reply; 0: not")        \
    X(COUNT, http_parting_max, "256", "connections of which that is done; the oldest gives way")   \
    X(BYTES, staging_request_bytes_max, "256M",                                                    \
      "of staging for one request; a larger one goes piece by piece to the device's pool")         \
    X(BYTES, keep_buffer_bytes, "2G",                                                              \
      "of each device's pool, kept for the next request that goes piece by piece")                 \
    X(COUNT, keep_buffer_ms, "10000", "how long; 0: not at all")                                   \
    X(COUNT, tensors_max, "256", "tensors that HTTP callers keep on the devices")                  \
    X(BYTES, tensor_bytes_max, "8G", "all of them together")                                       \
    X(BYTES, token_tensor_bytes_max, "4G", "those of one token")                                   \
    X(COUNT, token_tensors_max, "64", "how many one token may keep")                               \
    X(COUNT, tensor_lifetime_ms, "3600000", "how long one is kept that is not used, at most")      \
    X(FLAG, sandbox, "true", "bound the gateway's system calls and files")                         \
    X(TEXT, tls_cert, "", "PEM file with the certificate to serve HTTPS with; empty: HTTP")        \
    X(TEXT, tls_key, "", "PEM file with its key")                                                  \
    X(TEXT, tls_client_ca, "", "PEM file of the CA whose certificates clients must show")          \
    X(TEXT, tokens, "",                                                                            \
      "file of bearer tokens, a line each: NAME SHA256 RIGHTS (of infer,shm,metrics)")             \
    X(COUNT, token_requests_max, "64", "HTTP requests in flight of one token")                     \
    X(BYTES, token_bytes_max, "1G",                                                                \
      "staging memory held by the requests of one token; at most about half of it")                \
    X(BYTES, token_buffer_bytes_max, "16G",                                                        \
      "device memory held by the requests of one token that go piece by piece")

#define KLD_CONFIG_FIELD_TEXT char
#define KLD_CONFIG_FIELD_COUNT uint64_t
#define KLD_CONFIG_FIELD_BYTES uint64_t
#define KLD_CONFIG_FIELD_FLAG bool
#define KLD_CONFIG_FIELD_DEVICES char
#define KLD_CONFIG_SIZE_TEXT [KLD_CONFIG_TEXT_MAX]
#define KLD_CONFIG_SIZE_COUNT
#define KLD_CONFIG_SIZE_BYTES
#define KLD_CONFIG_SIZE_FLAG
#define KLD_CONFIG_SIZE_DEVICES [KLD_CONFIG_TEXT_MAX]

struct kld_config {
#define X(TYPE, name, value, help) KLD_CONFIG_FIELD_##TYPE name KLD_CONFIG_SIZE_##TYPE;
    KLD_CONFIG_MAP(X)
#undef X
};

enum kld_config_action {
    KLD_CONFIG_RUN,
    KLD_CONFIG_HELP,
    KLD_CONFIG_VERSION,
    KLD_CONFIG_METRICS /* the table of what /metrics says */
};

/* argv: without the program's name. environment: NULL-terminated NAME=value texts. The error names
 * the setting, where it came from and what was expected. */
enum kld_status kld_config_parse(int argc, char *const *argv, char *const *environment,
                                 struct kld_config *ret_config, enum kld_config_action *ret_action,
                                 struct kld_error *err);
/* The whole configuration as flags ("--http=127.0.0.1:0", ...), NULL-terminated, in memory to be
 * released with kld_config_arguments_free(). NULL when out of memory. */
char **kld_config_arguments(const struct kld_config *config);
void kld_config_arguments_free(char **arguments);
void kld_config_help(FILE *out);

/* How a setting of the table is written elsewhere: --log-level, KLD_LOG_LEVEL. */
#define KLD_CONFIG_NAME_MAX 48
void kld_config_flag_name(const char *name, char ret_flag[KLD_CONFIG_NAME_MAX]);
void kld_config_variable_name(const char *name, char ret_variable[KLD_CONFIG_NAME_MAX]);
/* Those that somebody may have meant who wrote this, which is none, by comma; "" if there are none.
 * write: one of the two above, or NULL. */
void kld_config_similar(const char *name,
                        void (*write)(const char *name, char ret_text[KLD_CONFIG_NAME_MAX]),
                        char *ret_list, size_t capacity);
/* A variable KLD_... that means nothing to us, nor to what else has such names? */
bool kld_config_stray_variable(const char *assignment, char ret_name[KLD_CONFIG_NAME_MAX],
                               char *ret_similar, size_t capacity);

/* Of these a server takes over the new value on SIGHUP; of the files, what is in them too. */
#define KLD_CONFIG_RELOADED "log_level,tokens,tls_cert,tls_key,tls_client_ca"

/* Takes over what a server that runs may take over from a configuration that was read again.
 * Another file may be named, but whether there is one was decided at start. ret_kept: the names of
 * settings that have another value there and kept theirs, by comma, as many as there is room for;
 * "" if there are none. */
void kld_config_adopt(struct kld_config *config, const struct kld_config *next, char *ret_kept,
                      size_t capacity);

/* How many devices `device` names; 0: all that the back end has. */
uint32_t kld_config_devices(const struct kld_config *config);
/* The number of the device of worker `index`, which is below the above; with "all" the index. */
uint32_t kld_config_device(const struct kld_config *config, uint32_t index);

#endif
