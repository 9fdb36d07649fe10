//! A driver that has no batched memory operations: each is a call of its own.
//!
//! A process can load only one driver, so this is a program of its own.

#[path = "engine/world.rs"]
#[allow(dead_code, reason = "a part of it is used here")]
mod world;

mod support;

use peerlane_simulated_driver::{install_from, without_symbols};
use world::{PLAIN, world};

#[test]
fn memory_operations_go_one_by_one() {
    let symbols =
        ["cuStreamBatchMemOp_v2", "cuStreamCreateWithPriority", "cuStreamGetCaptureInfo_v2"];
    let driver = install_from(&without_symbols(&symbols));
    for shard in [1000, 300_000] {
        let mut members = world(3, shard, None);
        for epoch in 1..=3 {
            let seed = |rank: usize| (16 * rank) as u8 + epoch as u8;
            members.iter().for_each(|member| member.fill(seed(member.me)));
            let before = driver.counter("single_words", None);
            let tickets: Vec<_> =
                members.iter_mut().map(|member| member.submit(epoch, PLAIN)).collect();
            for (member, ticket) in members.iter_mut().zip(tickets) {
                member.finish(ticket);
                member.ensure_gathered(seed, "word by word");
            }
            // Two signals and two waits for ready, the same for arrival.
            assert_eq!(driver.counter("single_words", None) - before, 3 * 8);
        }
    }
    assert_eq!(driver.counter("batches", None), 0);
}
