package kerneltest

import (
	"bufio"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// metaPackage leads to the newest kernel of the release.
const metaPackage = "linux-image-cloud-amd64"

// Image is a kernel with its modules.
type Image struct {
	Version string
	Kernel  string // path of vmlinuz
	Modules string // path of the packed part of the initramfs
}

// FindImage returns the newest image in the cache, or makes one. progress is told what takes time.
func FindImage(ctx context.Context, cache string, fresh bool, progress func(string)) (Image, error) {
	cache, err := filepath.Abs(cache)
	if err != nil {
		return Image{}, err
	}
	if !fresh {
		if im, ok := cachedImage(cache); ok {
			return im, nil
		}
	}
	name, version, err := newestPackage(ctx, progress)
	if err != nil {
		return Image{}, err
	}
	im := imageIn(filepath.Join(cache, imageName(version)), version)
	if im.complete() {
		return im, nil
	}
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return Image{}, err
	}
	work, err := os.MkdirTemp(cache, "making-")
	if err != nil {
		return Image{}, err
	}
	defer os.RemoveAll(work)
	progress("downloading " + name + " " + version)
	if err := command(ctx, work, "apt-get", "download", name+"="+version); err != nil {
		return Image{}, fmt.Errorf("downloading the guest's kernel: %w", err)
	}
	debs, _ := filepath.Glob(filepath.Join(work, "*.deb"))
	if len(debs) != 1 {
		return Image{}, fmt.Errorf("apt-get download %s left %d packages, want 1", name, len(debs))
	}
	progress("unpacking it (it is not installed)")
	root := filepath.Join(work, "root")
	if err := command(ctx, work, "dpkg", "-x", debs[0], root); err != nil {
		return Image{}, err
	}
	made := imageIn(filepath.Join(work, "image"), version)
	if err := makeImage(root, made); err != nil {
		return Image{}, fmt.Errorf("making the guest's image: %w", err)
	}
	target := filepath.Join(cache, imageName(version))
	_ = os.RemoveAll(target)
	return im, os.Rename(filepath.Join(work, "image"), target)
}

// imageName is an image's folder: another list of modules makes another image.
func imageName(version string) string {
	sum := sha256.Sum256([]byte(strings.Join(wanted, ",")))
	return fmt.Sprintf("%s_%x", version, sum[:4])
}

func imageIn(dir, version string) Image {
	return Image{Version: version, Kernel: filepath.Join(dir, "vmlinuz"), Modules: filepath.Join(dir, "modules.cpio.gz")}
}

func (im Image) complete() bool {
	_, a := os.Stat(im.Kernel)
	_, b := os.Stat(im.Modules)
	return a == nil && b == nil
}

func cachedImage(cache string) (Image, bool) {
	dirs, _ := filepath.Glob(filepath.Join(cache, imageName("*")))
	slices.Sort(dirs)
	for _, d := range slices.Backward(dirs) {
		version := strings.TrimSuffix(filepath.Base(d), imageName(""))
		if im := imageIn(d, version); im.complete() {
			return im, true
		}
	}
	return Image{}, false
}

// newestPackage asks apt which kernel package the release has, after an update if it knows none.
func newestPackage(ctx context.Context, progress func(string)) (name, version string, err error) {
	for _, update := range []bool{false, true} {
		if update {
			progress("apt-get update")
			if err := command(ctx, ".", "apt-get", "update"); err != nil {
				return "", "", err
			}
		}
		name = field(ctx, metaPackage, "Depends")
		name, _, _ = strings.Cut(strings.Split(name, ",")[0], " ")
		if name == "" {
			continue
		}
		if version = field(ctx, name, "Version"); version != "" {
			return name, version, nil
		}
	}
	return "", "", fmt.Errorf("apt knows no package %s: the guest needs Debian's package sources", metaPackage)
}

// field reads the first value of a field that apt shows of a package, "" if there is none.
func field(ctx context.Context, pkg, name string) string {
	out, err := exec.CommandContext(ctx, "apt-cache", "show", "--no-all-versions", pkg).Output()
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(out)) {
		if v, ok := strings.CutPrefix(line, name+": "); ok {
			return strings.TrimSpace(v)
		}
	}
	return ""
}

func command(ctx context.Context, dir, name string, args ...string) error {
	c := exec.CommandContext(ctx, name, args...)
	c.Dir = dir
	out, err := c.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w: %s", strings.Join(c.Args, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}

// makeImage takes the kernel and packs the modules from an unpacked package.
func makeImage(root string, im Image) error {
	kernels, _ := filepath.Glob(filepath.Join(root, "boot", "vmlinuz-*"))
	if len(kernels) != 1 {
		return fmt.Errorf("%d kernels in the package, want 1", len(kernels))
	}
	if err := os.MkdirAll(filepath.Dir(im.Kernel), 0o755); err != nil {
		return err
	}
	if err := os.Rename(kernels[0], im.Kernel); err != nil {
		return err
	}
	dir := filepath.Join(root, "lib", "modules")
	if _, err := os.Stat(dir); err != nil {
		dir = filepath.Join(root, "usr", "lib", "modules")
	}
	mods, err := findModules(dir)
	if err != nil {
		return err
	}
	f, err := os.Create(im.Modules)
	if err != nil {
		return err
	}
	z, _ := gzip.NewWriterLevel(f, gzip.BestSpeed)
	buf := bufio.NewWriter(z)
	a := newArchive(buf)
	for _, m := range mods {
		data, err := moduleBytes(m.from)
		if err != nil {
			return err
		}
		a.file(m.File, 0o644, data)
	}
	table, err := json.Marshal(mods)
	if err != nil {
		return err
	}
	a.file(ModuleTable, 0o644, table)
	return errors.Join(a.close(), buf.Flush(), z.Close(), f.Close())
}
