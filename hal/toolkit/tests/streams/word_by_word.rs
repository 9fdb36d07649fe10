//! Tests a driver without batched memory operations: each operation is a call.

use peerlane_simulated_driver::in_own_process;

use super::world::{PLAIN, world};
use crate::backend::oldest_driver;

#[test]
fn memory_operations_go_one_by_one() {
    in_own_process(|| {
        let driver = oldest_driver();
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
                // Two signals and two waits for `ready`, and two of each for `arrived`.
                assert_eq!(driver.counter("single_words", None) - before, 3 * 8);
            }
        }
        assert_eq!(driver.counter("batches", None), 0);
        assert_eq!(driver.counter("no_cu_copies", None), 0);
    });
}
