//! Handles of C programs, which are numbers that a table resolves, so that a wrong handle is an
//! error and not undefined behaviour.
//!
//! A handle contains its slot in the table, the generation of the slot, the kind of the object, and
//! a number of this copy of the library. Destroying an object raises the generation, and thus
//! invalidates all copies of the handle. A slot whose generations are used up gets no further
//! object, so no handle is given twice.

use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use peerlane::{Error, ErrorKind};

use crate::status::Failure;

const INDEX_BITS: u32 = 20;
const GENERATION_BITS: u32 = 20;
const KIND_BITS: u32 = 4;
const INDEX_MAX: usize = (1 << INDEX_BITS) - 1;
const GENERATION_MAX: usize = (1 << GENERATION_BITS) - 1;

/// The objects of one kind.
pub(crate) struct Table<T> {
    /// The name of the kind in errors.
    name: &'static str,
    kind: usize,
    slots: RwLock<Vec<Slot<T>>>,
}

struct Slot<T> {
    /// How many objects the slot has had. Above [`GENERATION_MAX`] the slot is not used any more.
    generation: usize,
    object: Option<Arc<T>>,
}

impl<T> Slot<T> {
    fn is_free(&self) -> bool {
        self.object.is_none() && self.generation <= GENERATION_MAX
    }
}

impl<T> Table<T> {
    pub(crate) const fn new(name: &'static str, kind: usize) -> Self {
        assert!(kind > 0 && kind < 1 << KIND_BITS);
        Self { name, kind, slots: RwLock::new(Vec::new()) }
    }

    /// Stores an object and writes its handle to `to`.
    ///
    /// # Safety
    /// `to` is valid for writes; [`clear`] has refused NULL.
    pub(crate) unsafe fn store_into<H>(&self, object: T, to: *mut *mut H) -> Result<(), Failure> {
        let handle = self.store(object)?;
        // SAFETY: the contract of this function says that `to` is valid for writes.
        unsafe { to.write(ptr::without_provenance_mut(handle)) };
        Ok(())
    }

    /// Stores an object and returns its handle.
    fn store(&self, object: T) -> Result<usize, Failure> {
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        let free = slots.iter().position(Slot::is_free);
        let index = free.unwrap_or(slots.len());
        if index > INDEX_MAX {
            let text = format!(
                "the handles of the kind {} are used up: there are {} slots",
                self.name,
                INDEX_MAX + 1
            );
            return Err(Failure::new(ErrorKind::OutOfMemory, text));
        }

        if free.is_none() {
            slots.push(Slot { generation: 0, object: None });
        }
        let slot = &mut slots[index];
        slot.object = Some(Arc::new(object));
        Ok(self.handle(index, slot.generation))
    }

    fn handle(&self, index: usize, generation: usize) -> usize {
        let number =
            (self.kind << (INDEX_BITS + GENERATION_BITS)) | (generation << INDEX_BITS) | index;
        number | (copy() << (INDEX_BITS + GENERATION_BITS + KIND_BITS))
    }

    /// Returns the object of a handle.
    pub(crate) fn get(&self, handle: usize) -> Result<Arc<T>, Failure> {
        let slots = self.slots.read().unwrap_or_else(PoisonError::into_inner);
        let slot = slots.get(handle & INDEX_MAX).filter(|slot| self.is_of(slot, handle));
        slot.and_then(|slot| slot.object.clone()).ok_or_else(|| self.wrong(handle))
    }

    /// Removes the object of a handle. Calls in progress keep it until they return.
    pub(crate) fn remove(&self, handle: usize) -> Result<Arc<T>, Failure> {
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        let slot = slots.get_mut(handle & INDEX_MAX).filter(|slot| self.is_of(slot, handle));
        let slot = slot.ok_or_else(|| self.wrong(handle))?;
        slot.generation += 1;
        slot.object.take().ok_or_else(|| self.wrong(handle))
    }

    /// Removes all objects that `belongs` returns true for, and returns them.
    pub(crate) fn remove_all(&self, belongs: impl Fn(&T) -> bool) -> Vec<Arc<T>> {
        let mut slots = self.slots.write().unwrap_or_else(PoisonError::into_inner);
        let removed = slots.iter_mut().filter_map(|slot| {
            let object = slot.object.take_if(|object| belongs(object))?;
            slot.generation += 1;
            Some(object)
        });
        removed.collect()
    }

    fn is_of(&self, slot: &Slot<T>, handle: usize) -> bool {
        slot.object.is_some() && self.handle(handle & INDEX_MAX, slot.generation) == handle
    }

    fn wrong(&self, handle: usize) -> Failure {
        let name = self.name;
        let of_copy = handle >> (INDEX_BITS + GENERATION_BITS + KIND_BITS) == copy();
        let kind = (handle >> (INDEX_BITS + GENERATION_BITS)) & ((1 << KIND_BITS) - 1);

        let text = match handle {
            0 => format!("the {name} is NULL, expected a handle"),
            _ if !of_copy => {
                format!(
                    "the {name} {handle:#x} is no handle of this library, or of another copy of it in this process"
                )
            }
            _ if kind != self.kind => {
                format!("{handle:#x} is the handle of another kind of object, expected a {name}")
            }
            _ => format!("the {name} {handle:#x} has been destroyed"),
        };
        Failure::new(ErrorKind::InvalidArgument, text)
    }
}

impl<T> Table<Mutex<Option<T>>> {
    /// Calls `body` with the object of a handle, which takes turns with other threads.
    pub(crate) fn with<R>(
        &self,
        handle: usize,
        body: impl FnOnce(&mut T) -> Result<R, Error>,
    ) -> Result<R, Failure> {
        let object = self.get(handle)?;
        let mut object = lock(&object);
        let destroyed =
            || Failure::argument(format!("the {} has been destroyed by another thread", self.name));
        Ok(body(object.as_mut().ok_or_else(destroyed)?)?)
    }
}

/// Refuses a NULL pointer for a handle, and otherwise clears the handle.
///
/// # Safety
/// `to` is NULL or valid for writes.
pub(crate) unsafe fn clear<T>(to: *mut *mut T, name: &str) -> Result<(), Failure> {
    if to.is_null() {
        let text = format!("{name} is NULL, expected where to write the handle");
        return Err(Failure::argument(text));
    }
    // SAFETY: it is not NULL, and the contract of this function says that it is valid for writes
    // then.
    unsafe { to.write(ptr::null_mut()) };
    Ok(())
}

/// Locks an object, also after a panic in another call.
pub(crate) fn lock<T>(object: &Mutex<T>) -> MutexGuard<'_, T> {
    object.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns a number that differs between copies of the library in a process, because it comes from
/// an address of this copy.
fn copy() -> usize {
    static MARK: u8 = 0;
    let address = (&raw const MARK).addr();
    // No pointer of a Linux process has these bits, so a pointer is never a handle.
    (address >> 12 ^ address >> 24) & 0x7fff | 0x8000
}

#[cfg(test)]
mod tests {
    use std::ffi::c_void;
    use std::thread;

    use super::*;

    /// Stores an object in a table and returns its handle.
    fn stored<T>(table: &Table<T>, object: T) -> usize {
        table.store(object).unwrap_or_else(|_| panic!("the table is full"))
    }

    fn error<T>(outcome: Result<Arc<T>, Failure>) -> String {
        outcome.err().expect("an error").text
    }

    #[test]
    fn no_handle_is_given_twice() {
        let table = Table::new("number", 1);
        let first = stored(&table, 7);
        let mut last = first;
        for object in 0..=1 << GENERATION_BITS {
            assert!(table.remove(last).is_ok());
            last = stored(&table, object);
            assert_ne!(last, first, "object {object}");
        }

        assert!(table.get(first).is_err() && table.remove(first).is_err());
        assert_eq!(table.get(last).ok().as_deref(), Some(&(1 << GENERATION_BITS)));
        assert_eq!(table.slots.read().unwrap().len(), 2);
    }

    #[test]
    fn the_objects_of_an_owner_are_removed_together() {
        let table = Table::new("number", 1);
        let handles = [1, 2, 1].map(|owner| stored(&table, owner));
        assert_eq!(table.remove_all(|owner| *owner == 1).len(), 2);
        assert_eq!(handles.map(|handle| table.get(handle).is_ok()), [false, true, false]);
        assert!(table.remove_all(|owner| *owner == 1).is_empty());

        // The slots are used again, with other handles.
        assert!(!handles.contains(&stored(&table, 3)));
        assert_eq!(table.slots.read().unwrap().len(), 3);
    }

    #[test]
    fn a_handle_is_valid_until_its_object_is_removed() {
        let table = Table::new("word", 1);
        let (first, second) = (stored(&table, "first"), stored(&table, "second"));
        assert_eq!(table.get(first).ok().as_deref(), Some(&"first"));
        let kept = table.get(second).ok();
        assert_eq!(table.remove(second).ok().as_deref(), Some(&"second"));
        assert_eq!(kept.as_deref(), Some(&"second"));
        let third = stored(&table, "third");
        assert_eq!(third & INDEX_MAX, second & INDEX_MAX);
        assert_eq!(table.get(third).ok().as_deref(), Some(&"third"));
        let destroyed = format!("the word {second:#x} has been destroyed");
        assert_eq!(error(table.get(second)), destroyed);
        assert_eq!(error(table.remove(second)), destroyed);
    }

    #[test]
    fn handles_of_something_else_are_named() {
        let (words, numbers) = (Table::new("word", 1), Table::new("number", 2));
        let number = stored(&numbers, 7);
        stored(&words, "first");
        assert_eq!(error(words.get(0)), "the word is NULL, expected a handle");
        assert_eq!(
            error(words.get(number)),
            format!("{number:#x} is the handle of another kind of object, expected a word")
        );
        let local = 1;
        let pointer = (&raw const local).addr();
        assert_eq!(
            error(words.get(pointer)),
            format!(
                "the word {pointer:#x} is no handle of this library, or of another copy of it in this process"
            )
        );
    }

    #[test]
    fn no_place_for_a_handle_is_an_error() {
        // SAFETY: NULL is allowed.
        assert!(unsafe { clear::<c_void>(ptr::null_mut(), "word") }.is_err());
        let mut handle: *mut c_void = ptr::without_provenance_mut(5);
        // SAFETY: the pointer is that of a local variable.
        assert!(unsafe { clear(&raw mut handle, "word") }.is_ok());
        assert!(handle.is_null());
    }

    #[test]
    fn threads_give_and_remove_at_the_same_time() {
        let table = Table::new("number", 1);
        let thread = |first: usize| {
            for number in first..first + 3 {
                let handle = stored(&table, number);
                assert_eq!(table.get(handle).ok().as_deref(), Some(&number));
                assert_eq!(table.remove(handle).ok().as_deref(), Some(&number));
                assert!(table.get(handle).is_err());
            }
        };
        thread::scope(|scope| {
            scope.spawn(|| thread(0));
            scope.spawn(|| thread(10));
        });
    }
}
