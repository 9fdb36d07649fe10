//! Tests topologies that the caller sets.

use peerlane_collectives::bootstrap::Bootstrap;
use peerlane_collectives::bootstrap::in_process;
use peerlane_collectives::group::GroupOptions;
use peerlane_collectives::topology::Topology;
use peerlane_hal::ErrorKind;

use super::{LONG, QUEUED, fabric, open};

fn refused(nodes: impl Fn(u32) -> &'static str + Sync) -> Vec<(ErrorKind, String)> {
    let ended = in_process::run(4, |bootstrap| {
        let topology: Topology = nodes(bootstrap.rank().0).parse()?;
        let options = GroupOptions::default().timeout(LONG).topology(topology);
        let error = open(bootstrap, options, QUEUED).unwrap_err();
        Ok((error.kind(), error.to_string()))
    });
    ended.unwrap()
}

#[test]
fn a_topology_of_another_number_of_ranks_is_refused_on_all() {
    for (rank, (kind, text)) in refused(|_| "2+1").into_iter().enumerate() {
        let own = "topology is 3 ranks on 2 nodes, expected 4 ranks, the number of ranks of the bootstrap";
        assert_eq!((kind, text.as_str()), (ErrorKind::InvalidArgument, own), "rank {rank}");
    }
    for (rank, (kind, text)) in
        refused(|rank| if rank == 2 { "3" } else { "2x2" }).into_iter().enumerate()
    {
        let own =
            "topology is 3 ranks on 1 node, expected 4 ranks, the number of ranks of the bootstrap";
        if rank == 2 {
            assert_eq!((kind, text.as_str()), (ErrorKind::InvalidArgument, own));
        } else {
            assert_eq!(text, format!("open: rank 2 failed (invalid argument): {own}"));
        }
    }
}

#[test]
fn ranks_agree_on_the_topology() {
    for (kind, text) in refused(|rank| if rank == 1 { "0,1,0,1" } else { "2x2" }) {
        assert_eq!(kind, ErrorKind::Mismatch);
        assert_eq!(text, "open: ranks disagree: topology is 0,1,0,1 on rank 1, 2x2 on rank 0");
    }
}

#[test]
fn ranks_agree_on_the_network() {
    let ended = in_process::run(2, |bootstrap| {
        let options = GroupOptions::default().timeout(LONG);
        let error = if bootstrap.rank().0 == 0 {
            open(bootstrap, options, QUEUED).unwrap_err()
        } else {
            let local = fabric(&bootstrap, true)?;
            options.open(bootstrap, local).unwrap_err()
        };
        Ok((error.kind(), error.to_string()))
    });
    for (kind, text) in ended.unwrap() {
        assert_eq!(kind, ErrorKind::Mismatch);
        assert_eq!(text, "open: ranks disagree: network is none on rank 1, host on rank 0");
    }
}
