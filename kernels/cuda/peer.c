/* peer.c - the other cards of this host whose memory this device may read and write in place: all
 * that the hardware connects to it, where the caller wants that, and else none. Maps nothing
 * (memory.c, vmm.c). The list is made while the device is opened and constant from then on. */
#include "kernels/cuda/device.h"

#include <string.h>

void cuda_peers_find(struct cuda_device *device, uint32_t count) {
    for (int i = 0; i < (int)count && device->peers_count < CUDA_PEERS_MAX; i++) {
        struct cudaDeviceProp properties;
        int reaches = 0;
        if (i == device->ordinal ||
            cudaDeviceCanAccessPeer(&reaches, device->ordinal, i) != cudaSuccess || !reaches ||
            cudaGetDeviceProperties(&properties, i) != cudaSuccess)
            continue;
        struct cuda_peer *peer = &device->peers[device->peers_count++];
        memcpy(peer->uuid, &properties.uuid, sizeof peer->uuid);
        peer->ordinal = i;
        peer->card = cuda_card_number(i);
    }
    cudaGetLastError();
}

bool cuda_reaches(struct kld_device *base, const uint8_t uuid[16]) {
    const struct cuda_device *device = (const struct cuda_device *)base;
    bool found = memcmp(uuid, base->info.uuid, sizeof base->info.uuid) == 0;
    for (uint32_t i = 0; i < device->peers_count && !found; i++)
        found = memcmp(uuid, device->peers[i].uuid, sizeof device->peers[i].uuid) == 0;
    return found;
}

bool cuda_reaches_ordinal(const struct cuda_device *device, int ordinal) {
    bool found = ordinal == device->ordinal;
    for (uint32_t i = 0; i < device->peers_count && !found; i++)
        found = ordinal == device->peers[i].ordinal;
    return found;
}
