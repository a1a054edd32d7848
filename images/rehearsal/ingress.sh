#!/bin/sh
# Allows connections that the machine's security groups allow (iptables arguments, one rule a line),
# and no others from outside. Run at each boot and whenever a group changes.
iptables --list --numeric >/dev/null 2>&1 || {
  update-alternatives --quiet --set iptables /usr/sbin/iptables-legacy
  update-alternatives --quiet --set ip6tables /usr/sbin/ip6tables-legacy
}
{
  echo '*filter'
  # Declaring the chain empties it; the rules below take effect together or not at all.
  echo ':REHEARSAL - [0:0]'
  echo '-A REHEARSAL -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT'
  sed 's/.*/-A REHEARSAL & -j ACCEPT/' /rehearsal/machine/ingress
  echo '-A REHEARSAL -j DROP'
  echo 'COMMIT'
} | iptables-restore --noflush
iptables --check INPUT --in-interface eth0 --jump REHEARSAL 2>/dev/null ||
  iptables --insert INPUT --in-interface eth0 --jump REHEARSAL
# A metadata response may make only one hop, so containers on this machine do not get it.
iptables --check INPUT ! --in-interface lo --destination 169.254.169.254 --jump DROP 2>/dev/null ||
  iptables --insert INPUT ! --in-interface lo --destination 169.254.169.254 --jump DROP
