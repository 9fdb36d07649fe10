//! Where the ranks are, and what is between their nodes.

use std::collections::BTreeMap;

use clap::ValueEnum;
use peerlane::Rank;
use peerlane::bootstrap::Bootstrap;
use peerlane::topology::Topology;

use super::backend::Backend;
use super::options::Options;
use crate::cards::Holder;
use crate::error::{Failure, Result};
use crate::ranks::circle::Circle;

/// What moves the bytes between nodes, as it is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Network {
    Auto,
    Same,
    Rdma,
}

/// What moves the bytes between nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Carrier {
    /// There is one node, or one fabric for all ranks.
    None,
    /// A second fabric of the same backend.
    Same,
    /// Network cards.
    Rdma,
}

/// Where the ranks are, seen from one of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) topology: Topology,
    pub(super) carrier: Carrier,
    /// Hosts that the ranks are on.
    pub(super) hosts: usize,
    /// The number of this rank among those of its host.
    pub(super) local_rank: usize,
}

impl Network {
    /// As the command line takes it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Same => "same",
            Self::Rdma => "rdma",
        }
    }
}

impl Place {
    /// Asks all ranks for their hosts. Collective.
    ///
    /// # Errors
    /// If what is asked for cannot be between these hosts.
    pub(super) fn find(options: &Options, circle: &Circle, backend: Backend) -> Result<Self> {
        let hosts = circle.share("host", &circle.host().to_owned())?;
        Self::of(options, &hosts, circle.rank(), backend)
    }

    fn of(options: &Options, hosts: &[String], me: Rank, backend: Backend) -> Result<Self> {
        let of_hosts = number(hosts);
        let given = options.tiers.topology(hosts.len())?;
        let own = Topology::of_nodes(&of_hosts)?;
        let hosts = own.nodes();
        let topology = given.unwrap_or_else(|| own.clone());
        if backend != Backend::Rdma {
            check_nodes(&topology, &own, backend)?;
        }
        let carrier = carrier(options, backend, topology.nodes(), hosts)?;
        if options.limit && carrier == Carrier::Rdma {
            let text =
                "--limit measures bare copies on one fabric, these ranks have rdma beside it";
            return Err(Failure::usage(text).with_advice("leave it out, or take --backend rdma"));
        }
        let uses_cards = carrier == Carrier::Rdma || backend == Backend::Rdma;
        if let Some(option) = options.cards.given().filter(|_| !uses_cards) {
            let text = format!("{option} is for network cards, and these ranks use none");
            let advice = "take --backend rdma, or leave it out";
            return Err(Failure::usage(text).with_advice(advice));
        }
        Ok(Self { topology, carrier, hosts, local_rank: own.local_index(me) })
    }

    /// This rank as the holder of a network card.
    pub(super) fn holder(&self, circle: &Circle) -> Holder {
        let (rank, ranks) = (circle.rank(), circle.ranks());
        Holder { rank, ranks, local_rank: self.local_rank, alone: self.hosts == 1 }
    }

    /// What was taken between nodes that nobody asked for, and why.
    pub(super) fn note(&self, options: &Options) -> Option<String> {
        let taken = self.carrier == Carrier::Rdma && options.tiers.network == Network::Auto;
        taken
            .then(|| format!("auto took rdma between nodes: the ranks are on {} hosts", self.hosts))
    }
}

/// Hosts by number, as they appear.
fn number(hosts: &[String]) -> Vec<u32> {
    let mut numbers: BTreeMap<&str, u32> = BTreeMap::new();
    let number = |host| {
        let next = numbers.len() as u32;
        *numbers.entry(host).or_insert(next)
    };
    hosts.iter().map(String::as_str).map(number).collect()
}

/// Inside a node bytes move through memory that ranks share, which those of two hosts do not.
fn check_nodes(nodes: &Topology, hosts: &Topology, backend: Backend) -> Result<()> {
    for node in 0..nodes.nodes() as u32 {
        let members = nodes.members(node);
        let Some(other) = members.iter().find(|rank| hosts.node(**rank) != hosts.node(members[0]))
        else {
            continue;
        };
        let (first, backend) = (members[0], backend.name());
        let text = format!(
            "--nodes puts rank {first} and rank {other} on one node, and they are on two hosts, which \
             {backend} does not reach across"
        );
        return Err(Failure::usage(text).with_advice("leave --nodes out, or take --backend rdma"));
    }
    Ok(())
}

fn carrier(options: &Options, backend: Backend, nodes: usize, hosts: usize) -> Result<Carrier> {
    let network = options.tiers.network;
    if backend == Backend::Rdma {
        // One fabric reaches all ranks, unless what is between nodes shall be slowed.
        let apart = nodes > 1 && (network != Network::Auto || options.tiers.is_throttled());
        return Ok(if apart { Carrier::Same } else { Carrier::None });
    }
    match (network, nodes, hosts) {
        (Network::Auto | Network::Same, 1, _) => Ok(Carrier::None),
        (Network::Rdma, 1, _) => {
            let text = "--network rdma is between nodes, and all ranks are on one node";
            Err(Failure::usage(text).with_advice("give --nodes, or take --backend rdma"))
        }
        (Network::Auto | Network::Same, _, 1) => Ok(Carrier::Same),
        (Network::Auto | Network::Rdma, ..) => Ok(Carrier::Rdma),
        (Network::Same, ..) => {
            let backend = backend.name();
            let text = format!("--network same: {backend} does not reach across {hosts} hosts");
            Err(Failure::usage(text).with_advice("take --network rdma"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::options::tests::parse;
    use super::*;

    fn place(line: &str, hosts: &str, backend: Backend) -> Result<Place> {
        let hosts: Vec<String> = hosts.chars().map(String::from).collect();
        Place::of(&parse(line).unwrap(), &hosts, Rank(1), backend)
    }

    #[test]
    fn ranks_on_several_hosts_have_rdma_between_them() {
        let auto = place("", "aabb", Backend::Host).unwrap();
        assert_eq!((auto.carrier, auto.hosts, auto.local_rank), (Carrier::Rdma, 2, 1));
        assert_eq!(auto.topology.notation(), "2x2");
        let note = auto.note(&parse("").unwrap()).unwrap();
        insta::assert_snapshot!(note, @"auto took rdma between nodes: the ranks are on 2 hosts");
        assert_eq!(auto.note(&parse("--network rdma").unwrap()), None);
        let own = place("", "abab", Backend::Rdma).unwrap();
        assert_eq!((own.carrier, own.local_rank), (Carrier::None, 0));
        assert_eq!(place("", "aaaa", Backend::Host).unwrap().carrier, Carrier::None);
    }

    #[test]
    fn virtual_nodes_have_a_second_fabric_unless_a_card_is_asked_for() {
        let carrier = |line| place(line, "aaaa", Backend::Host).unwrap().carrier;
        assert_eq!(carrier("--nodes 2"), Carrier::Same);
        assert_eq!(carrier("--nodes 2 --network rdma"), Carrier::Rdma);
        let slow = "--nodes 2 --network-bandwidth 1GB/s";
        assert_eq!(place(slow, "aaaa", Backend::Rdma).unwrap().carrier, Carrier::Same);
    }

    #[test]
    fn what_cannot_be_is_named() {
        let refusal = |line, hosts| place(line, hosts, Backend::Host).unwrap_err();
        insta::assert_snapshot!(refusal("--nodes 2", "abab"), @"
        error: --nodes puts rank 0 and rank 1 on one node, and they are on two hosts, which host does not reach across
         help: leave --nodes out, or take --backend rdma
        ");
        insta::assert_snapshot!(refusal("--network same", "aabb"), @"
        error: --network same: host does not reach across 2 hosts
         help: take --network rdma
        ");
        insta::assert_snapshot!(refusal("--network rdma", "aaaa"), @"
        error: --network rdma is between nodes, and all ranks are on one node
         help: give --nodes, or take --backend rdma
        ");
        insta::assert_snapshot!(refusal("--port 1", "aaaa"), @"
        error: --port is for network cards, and these ranks use none
         help: take --backend rdma, or leave it out
        ");
        insta::assert_snapshot!(refusal("--limit", "aabb"), @"
        error: --limit measures bare copies on one fabric, these ranks have rdma beside it
         help: leave it out, or take --backend rdma
        ");
    }
}
