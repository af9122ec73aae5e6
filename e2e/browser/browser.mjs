// What the scripts that look at the status page share.
import axe from 'axe-core';
import {chromium} from 'playwright-core';

export const launch = (executablePath) => chromium.launch({
	executablePath,
	// nothing but the page: Chromium's own connections would fail, and take time
	args: ['--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking',
		'--disable-component-update', '--disable-sync'],
});

const phone = {width: 375, height: 812}, desktop = {width: 1280, height: 900};

// views are the browsers that look at the page.
export const views = {
	'desktop': {viewport: desktop, colorScheme: 'light'},
	'desktop-dark': {viewport: desktop, colorScheme: 'dark', reducedMotion: 'reduce'},
	'tablet': {viewport: {width: 1060, height: 800}, colorScheme: 'light'},
	'phone': {viewport: phone, colorScheme: 'light', hasTouch: true, isMobile: true},
	'phone-dark': {viewport: phone, colorScheme: 'dark', hasTouch: true, isMobile: true},
};

// problems returns what axe-core finds.
export async function problems(page) {
	const results = await page.evaluate(`${axe.source}; axe.run()`);
	return results.violations.map((v) => `${v.impact}: ${v.id}: ${v.nodes.map((n) => n.html).join(' ').slice(0, 300)}`);
}

// open shows the page, waits until it updates itself, and reports what goes wrong.
export async function open(browser, name, url, view = views[name]) {
	const context = await browser.newContext(view);
	const page = await context.newPage();
	const report = {name, errors: [], elsewhere: [], problems: []};
	page.on('pageerror', (e) => report.errors.push(e.message));
	page.on('console', (m) => m.type() === 'error' && report.errors.push(m.text()));
	page.on('request', (r) => {
		const to = r.url().split('?')[0];
		if (to !== url && !to.startsWith('data:')) report.elsewhere.push(r.url());
	});
	await page.goto(url);
	await page.locator('#live[data-live=yes]').waitFor({timeout: patience});
	return {page, report};
}

export const patience = 60_000;

// close ends what open began.
export async function close({page, report}) {
	// by how much the page, or a table in it, is too wide
	report.sideways = await page.evaluate(() => Math.max(document.documentElement.scrollWidth - window.innerWidth,
		...[...document.querySelectorAll('table')].map((t) => t.offsetWidth - t.parentElement.querySelector('.head').offsetWidth)));
	report.live = await page.locator('#live').textContent();
	await page.context().close();
	return report;
}
