//! Contract 9: dependencies.

use std::ptr::NonNull;

use peerlane_hal::{Fabric, PeerMemory, Region, Role};

use crate::data::{aligned, pattern, seed};
use crate::driver::{OpOf, put, signal, wait_reset};
use crate::failure::{Failure, Outcome, ensure};
use crate::harness::{Harness, LocalOf};
use crate::world::{on_each, on_ranks};

/// All ranks signal interleaved words of every rank at once; each word ends with its own value, also
/// beside words that are reset.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn flags_of_one_region_do_not_disturb_each_other<H: Harness>(harness: &H) -> Outcome {
    const WORDS: u64 = 64;
    const ROUNDS: u64 = 5;
    on_each(harness, 1..=4, |me| {
        let ranks = me.ranks as u64;
        let flags = me.flags(WORDS * ranks)?;
        let mut driver = me.engine()?;
        let value = |word: u64, round: u64| round << 40 | word << 8 | 0x5A;
        let mut random = fastrand::Rng::with_seed(seed(me.me, 0));
        for round in 1..=ROUNDS {
            let mut ops: Vec<OpOf<'_, H>> = Vec::new();
            for word in (0..WORDS).map(|word| word * ranks + me.me as u64) {
                ops.extend(flags.remote.iter().map(|to| signal(to, word, value(word, round))));
            }
            random.shuffle(&mut ops);
            driver.run(&ops)?;
            for word in 0..WORDS * ranks {
                driver.reach(&flags.local, word, value(word, round))?;
            }
            me.meet()?;
            for at in 0..WORDS * ranks {
                let wanted = value(at, round);
                let seen = flags.local.flag_value(at).unwrap_or(wanted);
                ensure!(seen == wanted, "flag {at} is {seen:#x}, wanted {wanted:#x}");
            }
            me.meet()?;
        }
        if driver.caps().queued_wait {
            let odd = (0..WORDS * ranks).filter(|word| word % 2 == 1);
            let ops: Vec<OpOf<'_, H>> = odd.map(|at| wait_reset(&flags.local, at, 1)).collect();
            driver.run(&ops)?;
            for at in 0..WORDS * ranks {
                let wanted = if at % 2 == 1 { 0 } else { value(at, ROUNDS) };
                let seen = flags.local.flag_value(at).unwrap_or(wanted);
                ensure!(seen == wanted, "flag {at} is {seen:#x} beside resets, wanted {wanted:#x}");
            }
        }
        me.meet()
    })
}

/// Two aliases of one region, allocated and registered at an odd place of own memory: what is put
/// through them is in the region, and it lives on when they are gone.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn ones_own_key_gives_an_alias<H: Harness>(harness: &H) -> Outcome {
    on_ranks(harness, 1, |me| {
        let caps = me.caps;
        let bytes = aligned(&caps, 1000);
        let align = aligned(&caps, 1);
        let mut regions = vec![("allocated", me.allocate(2 * bytes, Role::Data)?)];
        if let Some(memory) = me.own_memory(2 * bytes + 2 * align) {
            let start = usize::try_from(align).expect("an alignment");
            let end = start + usize::try_from(2 * bytes).expect("a few bytes");
            regions.push(("registered", me.register(&*memory, start..end, Role::Data)?));
        }
        let source = me.allocate(bytes, Role::Data)?;
        for (name, region) in regions {
            me.poison(&region, 0..2 * bytes);
            let sent = [pattern(seed(0, 1), bytes), pattern(seed(0, 2), bytes)];
            {
                let key = me.fabric.memory().export(&region)?;
                let alias = || {
                    let alias = me.fabric.memory().import(me.rank(), &key, me.deadline());
                    alias.map_err(|e| Failure::from(e).within(format!("alias of {name} memory")))
                };
                let aliases = [alias()?, alias()?];
                let mut driver = me.engine()?;
                for (slot, alias) in (0..).zip(&aliases) {
                    me.write(&source, 0, &sent[slot]);
                    let to = (alias, slot as u64 * bytes);
                    driver.run(&[put(to, (&source, 0), bytes)])?;
                }
            }
            let what = format!("{name} memory, written through aliases");
            me.ensure_bytes(&what, &region, 0, &sent.concat())?;
        }
        Ok(())
    })
}

/// A second fabric registers a part of what the first one has allocated, as data and as flags. What it
/// puts and signals there is seen by the first one, which still knows the memory by its own name.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn what_one_fabric_allocated_another_can_register<H: Harness>(harness: &H) -> Outcome {
    const WORDS: u64 = 8;
    const WORD: u64 = 3;
    on_ranks(harness, 1, |me| {
        let caps = me.caps;
        let (bytes, head) = (aligned(&caps, 5000), aligned(&caps, 33));
        let landing = me.bytes(bytes + 2 * head)?;
        let flags = me.flags(WORDS)?;
        let sent = pattern(seed(0, 1), bytes);
        on_ranks(me.harness, 1, |other| {
            let part = |region: &LocalOf<H>, head: u64, bytes: u64, role| {
                let base = region.base().as_ptr().wrapping_add(head as usize);
                let base = NonNull::new(base).expect("an address inside a region");
                // SAFETY: inside the region, which lives as long as the other fabric's ranks; the
                // flags are zero, and only engines touch them.
                let part = unsafe { other.fabric.memory().register(base, bytes, role) };
                part.map_err(|e| Failure::from(e).within(format!("register as {role:?}")))
            };
            let data = part(&landing.local, head, bytes, Role::Data)?;
            let word = part(&flags.local, WORD * 8, 8, Role::Flags)?;
            let (data, word) = (other.share(data)?, other.share(word)?);
            let source = other.bytes(bytes)?;
            other.write(&source.local, 0, &sent);
            other.engine()?.run(&[
                put((&data.remote[0], 0), (&source.local, 0), bytes),
                signal(&word.remote[0], 0, 7),
            ])
        })
        .map_err(|failure: Failure| failure.within("the other fabric"))?;
        me.engine()?.reach(&flags.local, WORD, 7)?;
        me.ensure_bytes("memory of two fabrics", &landing.local, head, &sent)?;
        me.ensure_poison("the bytes before", &landing.local, 0..head)?;
        me.ensure_poison("the bytes behind", &landing.local, head + bytes..bytes + 2 * head)?;
        for word in 0..WORDS {
            let wanted = if word == WORD { 7 } else { 0 };
            let seen = flags.local.flag_value(word).unwrap_or(wanted);
            ensure!(seen == wanted, "flag {word} of two fabrics is {seen}, wanted {wanted}");
        }
        Ok(())
    })
}

/// Flags that were signalled, beside others that were not; words behind the end, and data.
///
/// # Errors
/// If the backend breaks the sentence.
pub fn a_region_tells_what_its_flags_hold<H: Harness>(harness: &H) -> Outcome {
    const WORDS: u64 = 8;
    on_ranks(harness, 2, |me| {
        let flags = me.flags(WORDS)?;
        let data = me.allocate(64, Role::Data)?;
        let mut driver = me.engine()?;
        let value = |word: u64| [0x1234_5678_9ABC_DEF0, 0, 1, u64::MAX][(word % 4) as usize];
        let words = (0..WORDS).filter(|word| word % 4 != 1);
        let to = &flags.remote[me.after(1)];
        let ops: Vec<OpOf<'_, H>> = words.map(|word| signal(to, word, value(word))).collect();
        driver.run(&ops)?;
        // The peer's ticket says nothing of this rank; its flags are here once the last one is.
        driver.reach(&flags.local, WORDS - 1, value(WORDS - 1))?;
        for word in 0..WORDS {
            let (seen, wanted) = (flags.local.flag_value(word), Some(value(word)));
            ensure!(seen == wanted, "flag {word} is said to be {seen:x?}, wanted {wanted:x?}");
        }
        for word in [WORDS, u64::MAX] {
            let seen = flags.local.flag_value(word);
            ensure!(seen.is_none(), "word {word} behind the end is said to be {seen:x?}");
        }
        let seen = data.flag_value(0);
        ensure!(seen.is_none(), "a region of data is said to have a flag of {seen:x?}");
        me.meet()
    })
}
