"""The ingress rules of a machine's security groups, as iptables arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moto.ec2.models.security_groups import SecurityGroup, SecurityGroupRule

PORTS = ("tcp", "udp")
ALL = "-1"
ICMP = {"icmp": "icmp", "1": "icmp", "6": "tcp", "17": "udp"}


def build_rules(groups: list[SecurityGroup], addresses: dict[str, list[str]]) -> list[str]:
    """Return a rule a line for moto's security groups. IPv6 is ignored: machines have none.

    `addresses` are the machines' addresses by group, for rules that refer to a group.
    """
    lines = []
    for group in groups:
        for rule in group.ingress_rules:
            sources = [rule.ip_range["CidrIp"]] if rule.ip_range.get("CidrIp") else []
            sources += addresses.get(rule.source_group.get("GroupId", ""), [])
            lines += [f"{_match_words(rule)} --source {source}".strip() for source in sources]
    return sorted(set(lines))


def _match_words(rule: SecurityGroupRule) -> str:
    protocol = ICMP.get(str(rule.ip_protocol), str(rule.ip_protocol))
    if protocol == ALL:
        return ""
    if protocol not in PORTS or rule.from_port is None or rule.from_port < 0:
        return f"--protocol {protocol}"
    return f"--protocol {protocol} --dport {rule.from_port}:{rule.to_port}"
