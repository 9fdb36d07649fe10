//! Lines of shell for the guest: ranks on its nodes, and what is counted.

/// Seconds of a wait inside a run: the guest is emulated, perhaps on a busy machine.
const TIMEOUT: u32 = 120;

/// Starts `program` as ranks with so many on each node; rank 0 speaks, and the others where it fails.
pub(super) fn ranks(ranks_of_nodes: &[usize], program: &str) -> String {
    let ranks: usize = ranks_of_nodes.iter().sum();
    let place = |rank: usize, node: usize, local: usize| {
        let local_ranks = ranks_of_nodes[node];
        format!(
            "ip netns exec node{node} env RANK={rank} WORLD_SIZE={ranks} LOCAL_RANK={local} \
             LOCAL_WORLD_SIZE={local_ranks} MASTER_ADDR=10.0.0.1 {program} --device rxe{node} \
             --timeout {TIMEOUT}"
        )
    };
    let places = ranks_of_nodes.iter().enumerate();
    let places = places.flat_map(|(node, count)| (0..*count).map(move |local| (node, local)));
    let mut lines = String::from("rm -f /tmp/rank*\n");
    for (rank, (node, local)) in places.enumerate().skip(1) {
        lines += &format!("{} >/tmp/rank{rank} 2>&1 &\n", place(rank, node, local));
    }
    lines + &format!("{} --json - || {{ cat /tmp/rank*; exit 1; }}\nwait\n", place(0, 0, 0))
}

/// Prints what both interfaces have sent so far, and how often both devices began to send again.
pub(super) fn count() -> String {
    let sent = [0, 1].map(|node| {
        format!("$(ip netns exec node{node} cat /sys/class/net/eth0/statistics/tx_bytes)")
    });
    // Devices are seen from outside of the nodes alone.
    let again = [0, 1].map(|node| {
        format!("$(cat /sys/class/infiniband/rxe{node}/ports/1/hw_counters/completer_retry_err)")
    });
    let (sent, again) = (sent.join(" "), again.join(" "));
    format!("echo sent {sent} {again}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_on_their_nodes_and_rank_0_speaks() {
        let lines = ranks(&[1, 2], "peerlane allgather");
        let lines: Vec<_> = lines.lines().collect();
        assert_eq!(
            lines[1],
            "ip netns exec node1 env RANK=1 WORLD_SIZE=3 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 \
             MASTER_ADDR=10.0.0.1 peerlane allgather --device rxe1 --timeout 120 >/tmp/rank1 2>&1 &"
        );
        assert!(lines[2].starts_with("ip netns exec node1 env RANK=2 WORLD_SIZE=3 LOCAL_RANK=1 "));
        assert!(lines[3].ends_with("--json - || { cat /tmp/rank*; exit 1; }"));
        assert_eq!(lines.len(), 5);
    }

    #[test]
    fn the_shell_accepts_every_line() {
        let lines = count() + &ranks(&[2, 2], "peerlane allgather");
        let output = std::process::Command::new("sh").args(["-n", "-c", &lines]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}
