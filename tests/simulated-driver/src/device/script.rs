//! Injects faults and delays into calls, by the name of the call.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use super::sync::lock;

/// A call that will fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Failure {
    /// How many calls pass before.
    after: u64,
    code: i32,
    /// Every call from then on, not only one.
    always: bool,
}

#[derive(Debug, Default)]
struct Call {
    count: u64,
    delay: Duration,
    failures: Vec<Failure>,
}

static CALLS: Mutex<Option<HashMap<String, Call>>> = Mutex::new(None);

fn with_call<T>(name: &str, look: impl FnOnce(&mut Call) -> T) -> T {
    let mut calls = lock(&CALLS);
    let calls = calls.get_or_insert_default();
    if !calls.contains_key(name) {
        calls.insert(name.to_owned(), Call::default());
    }
    look(calls.get_mut(name).expect("the entry was just made"))
}

/// Counts a call, waits if it shall take its time, and says with which code it shall fail.
pub(crate) fn begin(name: &str) -> Option<i32> {
    let (code, delay) = with_call(name, |call| {
        call.count += 1;
        let mut code = None;
        call.failures.retain_mut(|failure| {
            if failure.after > 0 {
                failure.after -= 1;
                return true;
            }
            code.get_or_insert(failure.code);
            failure.always
        });
        (code, call.delay)
    });
    if !delay.is_zero() {
        std::thread::sleep(delay);
    }
    code
}

/// Lets a call fail, after this many that do not.
pub(crate) fn fail(name: &str, after: u64, code: i32, always: bool) {
    with_call(name, |call| call.failures.push(Failure { after, code, always }));
}

/// Lets every such call take at least this long.
pub(crate) fn delay(name: &str, delay: Duration) {
    with_call(name, |call| call.delay = delay);
}

/// How often it was called.
pub(crate) fn count(name: &str) -> u64 {
    with_call(name, |call| call.count)
}

/// Nothing goes wrong any more.
pub(crate) fn clear() {
    for call in lock(&CALLS).iter_mut().flat_map(HashMap::values_mut) {
        call.failures.clear();
        call.delay = Duration::ZERO;
    }
}

/// Takes `name:after:code` or `name:after:code:always`, several of them with commas between.
///
/// # Errors
/// Says what was expected.
pub(crate) fn read(text: &str) -> Result<(), String> {
    for entry in text.split(',').filter(|entry| !entry.is_empty()) {
        let fields: Vec<&str> = entry.split(':').collect();
        let failure = match fields[..] {
            [name, after, code] => Some((name, after, code, false)),
            [name, after, code, "always"] => Some((name, after, code, true)),
            _ => None,
        };
        let parsed = failure.and_then(|(name, after, code, always)| {
            Some((name, after.parse().ok()?, code.parse().ok()?, always))
        });
        let (name, after, code, always) = parsed.ok_or_else(|| {
            format!("{entry}: expected CALL:AFTER:CODE or CALL:AFTER:CODE:always")
        })?;
        fail(name, after, code, always);
    }
    Ok(())
}
