//! Bytes and flags arrive, whatever the release and the kinds of engines.

use std::sync::atomic::Ordering;

use peerlane_hal::{
    At, CopyEngine as _, Error as _, ErrorKind, Fabric as _, Flag, LinkKind, Op, Rank, Region as _,
};
use peerlane_rocm::EngineKind;

use crate::world::{Machine, RELEASE, drive, gather, in_another_process, open, world, world_of};

#[test]
fn a_gather_arrives_on_every_rank() {
    let mut machine = Machine::new();
    machine.set("JITTER_US", "200", "0");
    for ranks in 1..=4 {
        for shard in [1, 3, 4097, (1 << 20) + 1] {
            let mut members = world(ranks, shard);
            for epoch in 1..=3 {
                gather(&mut members, epoch).unwrap();
            }
        }
    }
}

#[test]
fn gets_arrive_and_the_flag_behind_them_comes_later() {
    let mut machine = Machine::new();
    machine.set("PEER_JITTER_US", "300", "0");
    let mut members = world(3, 10_001);
    gather(&mut members, 1).unwrap();
    // Rank 0 fetches its shard back from the others, and says so.
    let ticket = members[0].submit(|me| {
        let get = |peer: usize| {
            let (dst, src) = (
                At { region: &me.output, offset: peer as u64 * 10_001 },
                At { region: &me.outputs[peer], offset: 0 },
            );
            Op::Get { dst, src, bytes: 10_001 }
        };
        vec![get(1), me.signal(1, 7), get(2), me.signal(2, 8), me.signal(0, 9)]
    });
    let ticket = ticket.unwrap();
    drive(&mut members[..1], |member| Ok(member.engine.completed()? >= ticket)).unwrap();
    let flag = |of: usize| members[of].flags.flags().unwrap()[0].load(Ordering::Acquire);
    assert_eq!([0, 1, 2].map(flag), [9, 7, 8]);
    let mut seen = vec![0; 2 * 10_001];
    members[0].output.download(10_001, &mut seen).unwrap();
    let shard = crate::world::pattern(10, 10_001);
    assert!(seen[..10_001] == shard && seen[10_001..] == shard);
}

#[test]
fn ranks_of_both_kinds_gather_together() {
    let _machine = Machine::new();
    // Flags of the second rank lie on its device, where the first one copies them to.
    let mut members = world_of(&[EngineKind::Sdma, EngineKind::Streams], 5000);
    assert_eq!(members[0].engine.kind(), EngineKind::Sdma);
    assert_eq!(members[1].engine.kind(), EngineKind::Streams);
    assert!(members[0].flags.flags().is_some() && members[1].flags.flags().is_none());
    for epoch in 1..=3 {
        let tickets: Vec<_> = members
            .iter_mut()
            .map(|member| {
                member.fill(epoch);
                let ops = member.submit(|me| {
                    let mut ops =
                        vec![me.put(0), me.put(1), me.signal(0, epoch), me.signal(1, epoch)];
                    if me.me == 1 {
                        let wait = |word| {
                            let flag = Flag { region: &me.flags, word };
                            Op::Wait { flag, value: epoch, reset: false }
                        };
                        ops.extend([wait(0), wait(1)]);
                    }
                    ops
                });
                ops.unwrap()
            })
            .collect();
        drive(&mut members, |member| {
            let flags = member.flags.flags();
            let seen = flags
                .is_none_or(|flags| flags.iter().all(|flag| flag.load(Ordering::Acquire) >= epoch));
            Ok(member.engine.completed()? >= tickets[member.me] && seen)
        })
        .unwrap();
        members.iter().for_each(|member| member.ensure_gathered(epoch));
    }
}

#[test]
fn devices_that_do_not_reach_each_other_meet_on_the_host() {
    let mut machine = Machine::new();
    machine.set("P2P", "off", "on");
    let mut members = world(3, 20_001);
    for epoch in 1..=2 {
        gather(&mut members, epoch).unwrap();
    }
    let ways = members[0].engine.sdma_ways();
    assert_eq!(ways[1].put, "SDMA 0+1 (preferred)", "the engines that lead to the host");
}

#[test]
fn streams_are_the_rule_where_they_wait_for_words() {
    let machine = Machine::new();
    let members = world_of(&[EngineKind::Auto; 2], 10);
    assert_eq!(members[0].engine.kind(), EngineKind::Streams);
    drop((members, machine));
    in_another_process("gather::without_words", "7.2");
}

/// What streams can is found out once in a process.
#[test]
#[ignore = "run by streams_are_the_rule_where_they_wait_for_words"]
fn without_words() {
    let mut machine = Machine::new();
    machine.set("WORDS_64", "off", "on");
    let mut members = world_of(&[EngineKind::Auto; 2], 10_001);
    assert_eq!(members[0].engine.kind(), EngineKind::Sdma);
    gather(&mut members, 1).unwrap();
}

#[test]
fn links_are_told_with_their_rates() {
    let mut machine = Machine::new();
    machine.set("HIVE", "2", "16");
    let mut fabrics: Vec<_> =
        Rank::all(3).map(|rank| open(rank, 3, EngineKind::Sdma).unwrap()).collect();
    let addresses: Vec<_> = fabrics.iter().map(|fabric| fabric.address()).collect();
    for (peer, address) in Rank::all(3).zip(&addresses) {
        fabrics[0].connect(peer, address, crate::world::soon()).unwrap();
    }
    let link = |peer| {
        let link = fabrics[0].link(Rank(peer)).unwrap();
        (link.kind, link.bytes_per_second)
    };
    assert_eq!(link(0), (LinkKind::Own, None));
    assert_eq!(link(1), (LinkKind::Xgmi, Some(100e9)));
    assert_eq!(link(2), (LinkKind::Pcie, Some(32e9)));
    let found = peerlane_rocm::link(0, 1).unwrap();
    assert_eq!((found.hops, found.weight), (Some(1), Some(15)));
    let far = peerlane_rocm::link(0, 2).unwrap();
    assert!(far.weight > found.weight && far.hops > found.hops, "{far:?}");
    let error = peerlane_rocm::link(0, 99).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
}

/// What an engine says of its ways, on this release.
#[test]
fn who_chooses_the_engines_is_told() {
    let _machine = Machine::new();
    let mut members = world(3, 100);
    gather(&mut members, 1).unwrap();
    let ways: Vec<_> = members[0].engine.sdma_ways().into_iter().map(|way| way.put).collect();
    let wanted = match std::env::var(RELEASE).as_deref() {
        Ok("5.7") => ["SDMA of the runtime's choice"; 3],
        Ok("6.1" | "6.4") => {
            ["SDMA 0+1 (by number)", "SDMA 2+3+4+5 (of those idle)", "SDMA 6+7+8+9 (of those idle)"]
        }
        _ => ["SDMA 0+1 (by number)", "SDMA 2+3 (preferred)", "SDMA 4+5 (preferred)"],
    };
    assert_eq!(ways, wanted);
}

#[test]
fn older_releases_gather_too() {
    for release in ["5.7", "6.1", "6.4"] {
        in_another_process("gather::who_chooses_the_engines_is_told", release);
        in_another_process("gather::a_gather_arrives_on_every_rank", release);
    }
}
