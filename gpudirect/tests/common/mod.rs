//! The host stand-in in the place of the driver's library: a copy of the shared object per test, so that each has a state of its
//! own.

#![allow(dead_code, reason = "each test program uses a part of it")]
#![allow(unsafe_code, reason = "calling the host stand-in's own functions")]

use std::{
    ffi::CString,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use libloading::Library;
use ntb_gpudirect::{
    GpuError,
    cuda::{Cuda, Driver},
    seam::Gpu,
};

pub(crate) struct Standin {
    dir: PathBuf,
    object: Library,
}

static NEXT: AtomicU32 = AtomicU32::new(0);

/// Where cargo has put the shared object: beside the test program, as for every dependency.
pub(crate) fn built() -> PathBuf {
    let me = std::env::current_exe().unwrap();
    me.parent().unwrap().join("libntb_gpu_standin.so")
}

impl Standin {
    pub(crate) fn new(words: &str) -> Self {
        Self::patched(words, None)
    }

    /// Without a symbol: its name in the file is spoilt.
    pub(crate) fn without(symbol: &str) -> Self {
        Self::patched("", Some(symbol))
    }

    fn patched(words: &str, spoil: Option<&str>) -> Self {
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("ntb-gpu-{}-{n}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let mut file = std::fs::read(built()).unwrap();
        if let Some(symbol) = spoil {
            let needle = [b"\0", symbol.as_bytes(), b"\0"].concat();
            let places: Vec<usize> = (0..file.len() - needle.len())
                .filter(|at| file[*at..].starts_with(&needle))
                .collect();
            assert!(!places.is_empty(), "{symbol} is in the file");
            for at in places {
                file[at + 1] = b'X';
            }
        }
        std::fs::write(dir.join("libcuda.so.1"), file).unwrap();
        // SAFETY: the file was written above.
        let object = unsafe { Library::new(dir.join("libcuda.so.1")) }.unwrap();
        let standin = Self { dir, object };
        standin.configure(words);
        standin
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.dir.join("libcuda.so.1")
    }

    pub(crate) fn configure(&self, words: &str) {
        let words = CString::new(words).unwrap();
        // SAFETY: the stand-in's own function, with its signature.
        unsafe {
            let configure: libloading::Symbol<'_, unsafe extern "C" fn(*const std::ffi::c_char)> =
                self.object.get(b"ntb_standin_configure\0").unwrap();
            configure(words.as_ptr());
        }
    }

    /// What was called, one call a line.
    pub(crate) fn log(&self) -> Vec<String> {
        let mut bytes = vec![0u8; 1 << 20];
        // SAFETY: the stand-in's own function, with its signature; the buffer is as long as said.
        let n = unsafe {
            let log: libloading::Symbol<'_, unsafe extern "C" fn(*mut u8, usize) -> usize> =
                self.object.get(b"ntb_standin_log\0").unwrap();
            log(bytes.as_mut_ptr(), bytes.len())
        };
        bytes.truncate(n);
        String::from_utf8(bytes)
            .unwrap()
            .lines()
            .map(str::to_owned)
            .collect()
    }

    /// What was not given back.
    pub(crate) fn left(&self) -> usize {
        // SAFETY: the stand-in's own function, with its signature.
        unsafe {
            let left: libloading::Symbol<'_, unsafe extern "C" fn() -> usize> =
                self.object.get(b"ntb_standin_left\0").unwrap();
            left()
        }
    }

    pub(crate) fn driver(&self) -> Result<Arc<Driver>, GpuError> {
        Driver::load(&self.path())
    }

    pub(crate) fn gpu(&self) -> Arc<dyn Gpu> {
        Arc::new(Cuda::open(&self.driver().unwrap(), 0).unwrap())
    }
}

impl Drop for Standin {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// The places of calls in a log, in the order given: each must be there.
pub(crate) fn places(log: &[String], calls: &[&str]) -> Vec<usize> {
    calls
        .iter()
        .map(|call| {
            log.iter()
                .position(|line| line.starts_with(call))
                .unwrap_or_else(|| panic!("{call} is not in {log:#?}"))
        })
        .collect()
}

pub(crate) fn missing_library() -> PathBuf {
    Path::new("/nonexistent/libcuda.so.1").to_owned()
}
