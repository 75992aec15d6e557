#!/bin/bash
# First program of the lab's kernel, started by boot.sh. The root is the host's / (hostfs, read
# only) below a tmpfs; the folder $exchange (named on the kernel's command line) is the host's,
# writable. Runs $exchange/command.sh there, leaves its status in $exchange/rc, powers off.
# A new process costs tens of milliseconds in here, so there are few.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
root=/mnt/root
mount -t tmpfs lab /mnt
mkdir /mnt/upper /mnt/work /mnt/lower $root
mount -a -T "$exchange/fstab"
read -r booted _ < $root/proc/uptime
echo "$booted" > "$root$exchange/booted"
ip link set lo up
# The console goes to a file: no carriage returns.
stty -opost

chroot $root /usr/bin/env -i LAB_EXCHANGE="$exchange" /bin/bash "$exchange/command.sh"
rc=$?
dmesg > "$root$exchange/dmesg.log" 2>&1
echo $rc > "$root$exchange/rc"
sync
exec poweroff -f
