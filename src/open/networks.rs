//! Selects the network between the nodes of a group from what every rank has found.
//!
//! A network is a row of [`Backend::NETWORKS`]; nothing here depends on which networks there are.

use peerlane_collectives::topology::Topology;
use peerlane_hal::{ErrorKind, Rank};

use super::rank_devices::RankDevices;
use super::survey::Backend;
use crate::Error;

/// Selects the backend between nodes; `None` if the backend `local` connects all ranks. Returns it
/// with the reasons for an automatic choice.
pub(super) fn select_network(
    requested: Option<Backend>,
    local: Backend,
    topology: &Topology,
    machines: &Topology,
    all: &[RankDevices],
) -> Result<(Option<Backend>, Vec<String>), Error> {
    let refuse = |text: String| Err(Error::new(ErrorKind::InvalidArgument, text));
    if topology.ranks() != machines.ranks() {
        let (given, ranks) = (topology.ranks(), machines.ranks());
        return refuse(format!("the topology has {given} ranks, expected {ranks}"));
    }

    let (nodes, machines) = (topology.nodes(), machines.nodes());
    if nodes == 1 || (local.is_network() && requested.is_none()) {
        return match requested {
            Some(network) if nodes == 1 => refuse(format!(
                "{network} is to connect nodes, but all ranks are on one node; set a topology or remove the network"
            )),
            _ if !local.is_network() && machines > 1 => refuse(format!(
                "the topology has one node, but the ranks are on {machines} machines, which {local} does not connect"
            )),
            _ => Ok((None, Vec::new())),
        };
    }

    let Some(network) = requested else {
        if machines == 1 {
            return Ok((Some(local), Vec::new()));
        }
        let (network, reasons) = choose_network(all, machines)?;
        return Ok((Some(network), reasons));
    };
    if !network.is_network() && machines > 1 {
        let networks = Backend::NETWORKS.map(Backend::name).join(" or ");
        return refuse(format!(
            "the ranks are on {machines} machines, which {network} does not connect; use {networks}"
        ));
    }
    match first_without(all, network) {
        Some((rank, lack)) => {
            let text = format!(
                "cannot use {network} between {nodes} nodes: {lack}; run `peerlane doctor` for details"
            );
            Err(Error::new(ErrorKind::Unavailable, text).with_peer(rank))
        }
        None => Ok((Some(network), Vec::new())),
    }
}

/// Returns the networks that the ranks may need, the preferred one first. Every rank returns the
/// same ones.
pub(super) fn needed_networks(all: &[RankDevices], machines: usize) -> Vec<Backend> {
    let requested = |found: &RankDevices| [found.requested, found.requested_network];
    let requested: Vec<_> =
        all.iter().flat_map(requested).flatten().filter(|backend| backend.is_network()).collect();
    let is_needed = |network: &Backend| match requested.is_empty() {
        true => machines > 1,
        false => requested.contains(network),
    };
    Backend::NETWORKS.into_iter().filter(is_needed).collect()
}

/// Chooses the first network that every rank can use. Returns it with the reasons.
fn choose_network(all: &[RankDevices], machines: usize) -> Result<(Backend, Vec<String>), Error> {
    let (mut lacks, mut first) = (Vec::new(), None);
    for network in Backend::NETWORKS {
        let Some((rank, lack)) = first_without(all, network) else {
            lacks.insert(0, format!("{network}: the ranks are on {machines} machines"));
            return Ok((network, lacks));
        };
        lacks.push(format!("{network}: {lack}"));
        first.get_or_insert(rank);
    }

    let text = format!(
        "the ranks are on {machines} machines, and no network connects all of them: {}; run `peerlane doctor` for details",
        lacks.join("; ")
    );
    let error = Error::new(ErrorKind::Unavailable, text);
    Err(first.into_iter().fold(error, Error::with_peer))
}

/// Returns the first rank that has no device of a backend, with a text that names its host and the
/// reason.
fn first_without(all: &[RankDevices], backend: Backend) -> Option<(Rank, String)> {
    let lack = |(rank, found): (Rank, &RankDevices)| {
        let reason = found.reason_without(backend)?;
        let host = &found.host;
        Some((rank, format!("rank {rank} on {host} has no usable {backend} device: {reason}")))
    };
    Rank::all(all.len()).zip(all).find_map(lack)
}

#[cfg(test)]
mod tests {
    use super::super::rank_devices::found;
    use super::*;

    #[test]
    fn only_networks_that_may_be_needed_are_looked_for() {
        let needed = |requested: [Option<Backend>; 2], machines| {
            let first = found("a", 0, &[]);
            let [requested, requested_network] = requested;
            let second = RankDevices { requested, requested_network, ..first.clone() };
            needed_networks(&[first, second], machines)
        };
        assert_eq!(needed([None, None], 1), []);
        assert_eq!(needed([Some(Backend::Host), None], 1), []);
        assert_eq!(needed([None, None], 2), Backend::NETWORKS);
        assert_eq!(needed([None, Some(Backend::Ucx)], 2), [Backend::Ucx]);
        assert_eq!(needed([Some(Backend::Ucx), None], 1), [Backend::Ucx]);
    }

    #[test]
    fn the_network_fits_nodes_and_machines() {
        let network = |requested, local, nodes: &[u32], machines: &[u32]| {
            let of = |nodes| Topology::of_nodes(nodes).unwrap();
            let all = vec![found("a", 0, &Backend::NETWORKS); machines.len()];
            select_network(requested, local, &of(nodes), &of(machines), &all)
                .map(|(network, _)| network)
                .map_err(|error| error.to_string())
        };
        let (host, first) = (Backend::Host, Backend::NETWORKS[0]);
        assert_eq!(network(None, host, &[0, 0], &[0, 0]), Ok(None));
        assert_eq!(network(None, host, &[0, 1], &[0, 0]), Ok(Some(host)));
        assert_eq!(network(None, host, &[0, 1], &[0, 1]), Ok(Some(first)));
        for each in Backend::NETWORKS {
            assert_eq!(network(Some(each), host, &[0, 1], &[0, 0]), Ok(Some(each)));
            assert_eq!(network(Some(each), host, &[0, 1], &[0, 1]), Ok(Some(each)));
            assert_eq!(network(None, each, &[0, 1], &[0, 1]), Ok(None));
            assert_eq!(network(Some(each), each, &[0, 1], &[0, 1]), Ok(Some(each)));
        }
        let refusals = [
            (network(Some(first), host, &[0, 0], &[0, 0]), "all ranks are on one node"),
            (
                network(Some(host), host, &[0, 1], &[0, 1]),
                "which host does not connect; use rdma or ucx",
            ),
            (network(None, host, &[0, 0], &[0, 1]), "which host does not connect"),
            (network(None, host, &[0, 0, 0], &[0, 0]), "the topology has 3 ranks, expected 2"),
        ];
        for (refusal, text) in refusals {
            assert!(
                refusal.as_ref().is_err_and(|error| error.contains(text)),
                "{refusal:?}: {text}"
            );
        }
    }

    #[test]
    fn ranks_on_several_machines_use_the_first_network_that_all_have() {
        let (rdma, ucx) = (Backend::Rdma, Backend::Ucx);
        let two = Topology::of_nodes(&[0, 1]).unwrap();
        let choice = |requested, networks: [&[Backend]; 2]| {
            let all = [found("nodea", 0, networks[0]), found("nodeb", 0, networks[1])];
            select_network(requested, Backend::Host, &two, &two, &all)
                .map(|(network, reasons)| (network.unwrap(), reasons.join("; ")))
                .map_err(|error| (error.kind(), error.peer(), error.to_string()))
        };
        let chosen = |network, reasons: &str| Ok((network, reasons.to_owned()));
        let refused =
            |rank, text: &str| Err((ErrorKind::Unavailable, Some(Rank(rank)), text.to_owned()));

        let on_two = "rdma: the ranks are on 2 machines";
        assert_eq!(choice(None, [&[rdma, ucx]; 2]), chosen(rdma, on_two));
        assert_eq!(choice(None, [&[rdma]; 2]), chosen(rdma, on_two));
        assert_eq!(
            choice(None, [&[rdma, ucx], &[ucx]]),
            chosen(
                ucx,
                "ucx: the ranks are on 2 machines; rdma: rank 1 on nodeb has no usable rdma device: rdma is missing; install rdma"
            )
        );
        assert_eq!(
            choice(None, [&[rdma], &[ucx]]),
            refused(
                1,
                "the ranks are on 2 machines, and no network connects all of them: rdma: rank 1 on nodeb has no usable rdma device: rdma is missing; install rdma; ucx: rank 0 on nodea has no usable ucx device: ucx is missing; install ucx; run `peerlane doctor` for details"
            )
        );

        // A network that is named is not replaced.
        assert_eq!(choice(Some(ucx), [&[rdma, ucx]; 2]), chosen(ucx, ""));
        assert_eq!(
            choice(Some(ucx), [&[rdma], &[rdma, ucx]]),
            refused(
                0,
                "cannot use ucx between 2 nodes: rank 0 on nodea has no usable ucx device: ucx is missing; install ucx; run `peerlane doctor` for details"
            )
        );
    }
}
